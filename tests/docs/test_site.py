"""The documentation as a site: it builds without a warning, has no broken link, and loads nothing from other hosts."""

import functools
import html
import http.server
import importlib
import os
import re
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import lipflow
from tests.processes import TIMEOUT_SECONDS
from tests.report.test_browser import browser as browser  # the fixture: Chromium, or a skipped test

ROOT = Path(__file__).parents[2]
PACKAGES = ("blocks", "data", "flows", "graph", "models", "operators", "primitives", "train")


def texts_in(page: str, tag: str) -> list[str]:
    """The text of each element with a tag."""
    elements = re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", page, re.DOTALL)
    return [html.unescape(re.sub(r"<[^>]+>", "", element)) for element in elements]


class Page(HTMLParser):
    """The links of a page, what it loads, its anchors, its headings and its emphasised text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        text = path.read_text(encoding="utf-8")
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.headings, self.emphasised = texts_in(text, "h3"), texts_in(text, "em")
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = {name: value or "" for name, value in attrs}
        self.anchors.update(values[name] for name in ("id", "name") if name in values)
        if tag == "a" or (tag == "link" and values.get("rel") in ("prev", "next", "canonical")):
            self.links += [values["href"]] if "href" in values else []
        else:
            self.loads += [values[name] for name in ("src", "srcset", "data", "href") if name in values]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The built site. Without the documentation tools the test is skipped, unless LIPFLOW_DOCS=1, as in `make test`."""
    if os.environ.get("LIPFLOW_DOCS") != "1":
        for name in ("mkdocs", "material", "mkdocstrings_handlers.python"):
            pytest.importorskip(name, reason="the documentation tools are not installed: make venv")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == "", done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}


def test_no_link_is_broken(site, pages):
    broken = []
    for path, page in pages.items():
        for link in page.links + page.loads:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            fragment = unquote(parts.fragment)
            if not target.is_file() or (fragment and target in pages and fragment not in pages[target].anchors):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert broken == []


def test_nothing_is_loaded_from_another_host(site, pages):
    """A reader may follow links to papers, but the page may fetch nothing by itself."""
    loaded = [load for page in pages.values() for load in page.loads if urlsplit(load).netloc]
    assert [load for load in loaded if not load.startswith("data:")] == []
    for style in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*['\"]?(https?:)?//", style.read_text(encoding="utf-8")), style


def test_every_public_name_is_on_a_page_of_the_api(site, pages):
    headings = [text for path, page in pages.items() if path.parent.name == "api" for text in page.headings]
    shown = {word for text in headings for word in text.split()}
    top = set(lipflow.__all__) - {"__version__"}
    names = {f"lipflow.{name}" for name in top}
    for package in PACKAGES:
        members = importlib.import_module(f"lipflow.{package}").__all__
        names |= {f"lipflow.{package}.{name}" for name in members if name not in top}
    assert sorted(names - shown) == []


@pytest.mark.parametrize("name", ["certify_your_cnn.py", "custom_field.py"])
def test_the_examples_are_shown_in_full(site, name):
    """A formatter may break the lines that include them."""
    shown = html.unescape(re.sub(r"<[^>]+>", "", (site / "examples.html").read_text(encoding="utf-8")))
    code = (ROOT / "examples" / name).read_text(encoding="utf-8")
    assert [line for line in code.splitlines() if line.strip() and line.strip() not in shown] == []
    assert "--8" not in shown


def test_no_formula_is_taken_for_emphasis(pages):
    """In Markdown, two formulas such as z* or ‖W‖_F in a paragraph may be read as emphasis."""
    found = [text for page in pages.values() for text in page.emphasised if re.search(r"[‖=≤≥⁻²∇{}]", text)]
    assert [text for text in found if not text.endswith(", published")] == []  # rows of a table


def test_the_site_works_in_a_browser(site, pages, browser):
    """Every page fits a phone, prints no error and loads from its own server only; the search works."""
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        root = f"http://127.0.0.1:{server.server_address[1]}/"
        printed, requested, wide = [], [], []
        context = browser.new_context(viewport={"width": 390, "height": 800})
        tab = context.new_page()
        tab.set_default_timeout(120_000)  # for a busy machine
        tab.on("console", lambda message: printed.append(message.text))
        tab.on("pageerror", lambda error: printed.append(str(error)))
        tab.on("request", lambda request: requested.append(request.url))
        for path in sorted(pages):
            tab.goto(root + path.relative_to(site).as_posix())
            if tab.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"):
                wide.append(path.name)
        tab.set_viewport_size({"width": 1280, "height": 900})
        tab.goto(root + "index.html")
        tab.locator("input.md-search__input").click()
        tab.get_by_text("Type to start searching").wait_for()  # for the index
        tab.locator("input.md-search__input").press_sequentially("twisted torus")
        tab.locator(".md-search-result__link").first.wait_for()
        assert "norms" in tab.locator(".md-search-result__link").first.get_attribute("href")
        context.close()
        server.shutdown()
    assert wide == []
    assert printed == []
    assert [url for url in requested if not url.startswith((root, "data:", "blob:"))] == []


class Quiet(http.server.SimpleHTTPRequestHandler):
    """A server of files that prints nothing."""

    def log_message(self, format, *args):
        pass
