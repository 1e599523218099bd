"""The elements of an HTML page."""

from html.parser import HTMLParser


class Elements(HTMLParser):
    """Every element with its attributes, and the text of the elements of some tags."""

    def __init__(self, page: str, *tags: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.text: dict[str, list[str]] = {tag: [] for tag in tags}
        self._inside: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, {name: value or "" for name, value in attrs}))
        if tag in self.text:
            self._inside.append(tag)
            self.text[tag].append("")

    def handle_endtag(self, tag):
        if self._inside and tag == self._inside[-1]:
            self._inside.pop()

    def handle_data(self, data):
        for tag in self._inside:
            self.text[tag][-1] += data
