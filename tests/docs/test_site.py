"""The documentation site: it builds without a warning, has no broken link, and requests nothing from other hosts."""

import html
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest

import lipflow
from tests.elements import Elements
from tests.processes import TIMEOUT_SECONDS
from tests.report.test_browser import browser as browser  # the fixture: Chromium, or a skipped test
from tests.server import serve

ROOT = Path(__file__).parents[2]
PACKAGES = ("blocks", "data", "flows", "graph", "models", "operators", "primitives", "train")


class Page(Elements):
    """The links, loads and anchors of a page, and the text of its h3 and em."""

    def __init__(self, path: Path) -> None:
        super().__init__(path.read_text(encoding="utf-8"), "h3", "em")
        links = [a for tag, a in self.found if is_link(tag, a)]
        others = [a for tag, a in self.found if not is_link(tag, a)]
        self.links = [a["href"] for a in links if "href" in a]
        self.loads = [a[name] for a in others for name in ("src", "srcset", "data", "href") if name in a]
        self.anchors = {a[name] for _, a in self.found for name in ("id", "name") if name in a}


def is_link(tag: str, attributes: dict[str, str]) -> bool:
    return tag == "a" or (tag == "link" and attributes.get("rel") in ("prev", "next", "canonical"))


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The built site. With LIPFLOW_DOCS=1, missing documentation tools are an error, otherwise a skipped test."""
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
    """Links to other hosts are allowed, loads are not."""
    loaded = [load for page in pages.values() for load in page.loads if urlsplit(load).netloc]
    assert [load for load in loaded if not load.startswith("data:")] == []
    for style in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*['\"]?(https?:)?//", style.read_text(encoding="utf-8")), style


def test_every_public_name_is_on_a_page_of_the_api(site, pages):
    headings = [text for path, page in pages.items() if path.parent.name == "api" for text in page.text["h3"]]
    shown = {word for text in headings for word in text.split()}
    top = set(lipflow.__all__) - {"__version__"}
    names = {f"lipflow.{name}" for name in top}
    for package in PACKAGES:
        module = importlib.import_module(f"lipflow.{package}")
        public = [k for k, value in vars(module).items() if k[0] != "_" and not isinstance(value, ModuleType)]
        members = getattr(module, "__all__", public)
        names |= {f"lipflow.{package}.{name}" for name in members if name not in top}
    assert sorted(names - shown) == []


@pytest.mark.parametrize("name", ["certify_your_cnn.py", "custom_field.py"])
def test_examples_are_shown_in_full(site, name):
    """A formatter once broke the includes."""
    shown = html.unescape(re.sub(r"<[^>]+>", "", (site / "examples.html").read_text(encoding="utf-8")))
    code = (ROOT / "examples" / name).read_text(encoding="utf-8")
    assert [line for line in code.splitlines() if line.strip() and line.strip() not in shown] == []
    assert "--8" not in shown


def test_no_formula_is_emphasised(pages):
    """Two asterisks or underscores in formulas such as z* and ‖W‖_F would be emphasis in Markdown."""
    found = [text for page in pages.values() for text in page.text["em"] if re.search(r"[‖=≤≥⁻²∇{}]", text)]
    assert [text for text in found if not text.endswith(", published")] == []  # rows of a table


def test_pages_fit_a_phone_log_nothing_and_can_be_searched(site, pages, browser):
    """Every page fits a phone, logs nothing and requests its own server only; the search works."""
    with serve(site) as url:
        root = f"{url}/"
        logged, requested, wide = [], [], []
        context = browser.new_context(viewport={"width": 390, "height": 800})
        tab = context.new_page()
        tab.set_default_timeout(120_000)  # a busy machine is slow
        tab.on("console", lambda message: logged.append(message.text))
        tab.on("pageerror", lambda error: logged.append(str(error)))
        tab.on("request", lambda request: requested.append(request.url))
        for path in sorted(pages):
            tab.goto(root + path.relative_to(site).as_posix())
            if tab.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"):
                wide.append(path.name)
        tab.set_viewport_size({"width": 1280, "height": 900})
        tab.goto(root + "index.html")
        tab.locator("input.md-search__input").click()
        tab.get_by_text("Type to start searching").wait_for()  # keys typed before the index is loaded are lost
        tab.locator("input.md-search__input").press_sequentially("twisted torus")
        tab.locator(".md-search-result__link").first.wait_for()
        assert "norms" in tab.locator(".md-search-result__link").first.get_attribute("href")
        context.close()
    assert wide == []
    assert logged == []
    assert [url for url in requested if not url.startswith((root, "data:", "blob:"))] == []
