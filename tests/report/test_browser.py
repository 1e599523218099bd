"""The page in a real browser: it works by pointer and by keyboard, without an error and without a request."""

import json
import os
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest

from lipflow.report.page import page
from lipflow.report.run_results import read
from lipflow.report.table import summarise
from tests.report.conftest import rows

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make venv")
    program = os.environ.get("LIPFLOW_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip("no Chromium is installed: apt-get install chromium, or set LIPFLOW_BROWSER to its path")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def file(original, tmp_path_factory):
    """The page of two runs."""
    runs = [read(original, "one"), read(original, "<i>two</i>")]
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page(runs, summarise(runs)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def published(original, tmp_path_factory):
    """The page of two runs of a network of the paper, at eight ε."""
    one = read(original, "one")
    config = replace(one.record.run, model="cpl-s", data="cifar10", model_args={})
    one = replace(one, record=replace(one.record, run=config))
    runs = [one, replace(one, name="a-run-whose-name-is-as-long-as-those-of-experiments")]
    path = tmp_path_factory.mktemp("page") / "published.html"
    epsilons = ("36/255", "0.2", "72/255", "0.4", "108/255", "0.6", "0.8", "1")
    path.write_text(page(runs, summarise(runs, epsilons)), encoding="utf-8")
    return path


@pytest.fixture
def visit(browser):
    """Open a file; at the end, no page may have requested anything or printed an error."""
    contexts, printed, requested = [], [], []

    def open_file(path, width=1100):
        context = browser.new_context(viewport={"width": width, "height": 900}, offline=True)
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: printed.append(message.text))
        tab.on("pageerror", lambda error: printed.append(str(error)))
        tab.on("request", lambda request: requested.append(request.url))
        tab.goto(path.as_uri())
        return tab

    yield open_file
    for context in contexts:
        context.close()
    assert printed == []
    assert [url for url in requested if not url.startswith(("data:", "file:"))] == []
    assert len([url for url in requested if url.startswith("file:")]) == len(contexts)


@pytest.fixture
def opened(visit, file):
    return visit(file)


def choose(tab, eps: float) -> float:
    """Move the slider; return the ε that it shows."""
    slider = tab.locator("#epsilon")
    slider.evaluate("(s, v) => { s.value = v; s.dispatchEvent(new Event('input')); }", eps)
    return float(slider.input_value())


def certified(original, eps: float) -> str:
    held = rows(original)
    return f"{((held['label'] == held['truth']) & (held['radius'] > eps)).mean():.2%}"


def test_an_attack_bounds_the_accuracy_at_larger_radii(opened, original):
    outcome = json.loads((original / "attack.json").read_text())
    cell = opened.locator(".readout tr[data-of=part] .left").first
    measured = {eps: f"{np.mean(flags):.2%}" for eps, flags in outcome["robust"].items()}
    for eps, text in {**measured, "36/255": f"≤ {measured['0.1']}"}.items():
        opened.locator(".marks button", has_text=re.compile(f"^{re.escape(eps)}$")).click()
        assert cell.inner_text() == text
    choose(opened, 0)
    assert cell.inner_text() == f"{np.mean(outcome['clean']):.2%}"


def test_certified_attacked_and_clean_are_of_the_same_images(opened, original):
    """The row of all images shows no attack on some of them."""
    held, row = rows(original), opened.locator(".readout tr[data-of=part]").first
    assert row.locator("th").inner_text().strip() == "first 40 images"
    right, seen = (held["label"] == held["truth"])[:40], set()
    for eps in (0, 0.1, 0.3, 0.5, 0.8):
        value = choose(opened, eps)
        texts = [row.locator(f".{name}").inner_text() for name in ("proved", "left", "clean")]
        certified, attacked, clean = (float(text.strip("≤ %")) for text in texts)
        assert certified <= attacked <= clean
        exact = right if value == 0 else right & (held["radius"][:40] > value)
        assert (certified, clean) == (100 * exact.mean(), 100 * right.mean())
        assert opened.locator(".readout tr[data-of=whole] .left").first.inner_text() == "–"
        seen.add(texts[0])
    assert len(seen) > 2
    assert "under attack, first 40 images" in opened.locator(".choose.key").inner_text()


def test_radii_are_compared_exactly(opened, original):
    """At ε = R an image is not certified, and just below R it is."""
    held = rows(original)
    right = np.sort(held["radius"][held["label"] == held["truth"]])
    for radius in right[::5]:
        for eps in (radius, np.nextafter(radius, 0)):
            assert opened.evaluate("(eps) => certified(DATA.runs[0], eps)", float(eps)) == (right > eps).sum()


def test_the_keyboard_reaches_and_sets_everything(opened, original):
    slider, number = opened.locator("#epsilon"), opened.locator(".readout .proved").first
    assert number.inner_text() == certified(original, 0.1)  # the first ε of the table
    slider.focus()
    before = float(slider.input_value())
    opened.keyboard.press("ArrowRight")
    after = float(slider.input_value())
    assert after > before
    assert number.inner_text() == certified(original, after)
    assert slider.get_attribute("aria-valuetext") == f"ε = {after:g}"
    for key in ("Tab", "Tab", "Enter"):  # the second button of ε
        opened.keyboard.press(key)
    assert opened.locator(".marks button[aria-pressed=true]").inner_text() == "36/255"
    assert number.inner_text() == certified(original, 36 / 255)
    tip = opened.locator("#epsilon-chart .tip")
    opened.locator("#epsilon-chart svg").focus()
    opened.keyboard.press("ArrowRight")
    assert "one: certified" in tip.inner_text()
    opened.keyboard.press("Escape")
    assert not tip.is_visible()
    opened.locator("body").focus()
    reached = set()
    for _ in range(60):
        opened.keyboard.press("Tab")
        reached.add(opened.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert {"theme", "epsilon", "differences", "svg", "SUMMARY", "BUTTON"} <= reached


def test_the_pointer_reads_and_sets_the_chart(opened, original):
    chart = opened.locator("#epsilon-chart")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    place = box["x"] + 0.4 * box["width"], box["y"] + 100
    opened.mouse.move(*place)
    tip = chart.locator(".tip").inner_text()
    assert tip.startswith("ε = 0.")
    held = rows(original)
    clean = f"{(held['label'] == held['truth'])[:40].mean():.2%}"
    assert re.search(rf"<i>two</i>, first 40 images: certified [\d.]+%, under attack ≤ [\d.]+%, clean {clean}", tip)
    opened.mouse.click(*place)
    value = float(opened.locator("#epsilon-value").inner_text())
    assert opened.locator(".readout .proved").first.inner_text() == certified(original, value)


def test_runs_and_curves_are_chosen(opened):
    traces = opened.locator("#epsilon-chart g[data-run]")
    assert traces.count() == 4
    opened.locator("#curves input[data-hides='run 1']").uncheck()
    assert traces.count() == 2
    assert not opened.locator("#training input[data-hides='run 1']").is_checked()
    assert all(row.is_hidden() for row in opened.locator(".readout tr[data-run='1']").all())
    assert opened.locator("#loss-chart g[data-run]").count() == 1
    opened.locator("input[data-hides='kind attacked']").uncheck()
    assert traces.count() == 1
    opened.locator("#training input[data-hides='run 1']").check()
    assert traces.count() == 2


def test_names_are_text_and_scripts_do_not_run(opened, browser, file, tmp_path):
    """If a string were not escaped, the Content-Security-Policy would still stop its script."""
    assert opened.locator("i:text-is('two')").count() == 0
    assert opened.locator(".readout th.whole").nth(-1).inner_text().startswith("<i>two</i>")
    broken = tmp_path / "broken.html"
    evil = "<script>document.title = 'broken'</script><img src=x onerror=\"document.title = 'broken'\">"
    broken.write_text(file.read_text(encoding="utf-8").replace("<h1>", f"{evil}<h1>"), encoding="utf-8")
    tab = browser.new_page()
    tab.goto(broken.as_uri())
    tab.wait_for_timeout(200)
    assert tab.title() != "broken"
    assert tab.locator("#epsilon-chart svg").count() == 1
    tab.close()


def test_the_paper_is_drawn_once_and_in_grey(visit, published):
    tab = visit(published)
    traces = tab.locator("#epsilon-chart g[data-look=paper]")
    assert traces.count() == 1
    assert traces.get_attribute("class") == "grey"
    tab.locator("#epsilon-chart svg").focus()
    tab.keyboard.press("Home")
    tip = tab.locator("#epsilon-chart .tip").inner_text()
    assert tip.count("the paper's CPL-S on cifar10, certified: 75.6% at 0") == 1
    tab.locator("input[data-hides='kind published']").uncheck()
    assert traces.count() == 0


@pytest.mark.parametrize(("width", "table"), [(320, ""), (390, "#curves"), (768, ""), (1200, "#summary")])
def test_the_page_fits_any_width(visit, published, width, table):
    """On a phone, certified, attacked and clean accuracy are seen together."""
    tab = visit(published, width)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.locator("#epsilon-chart svg").bounding_box()["width"] <= width
    assert tab.locator("#epsilon-chart g[data-run] path.line").first.get_attribute("d")
    assert not table or tab.locator(f"{table} .scroll").evaluate("(b) => b.scrollWidth <= b.clientWidth")
    assert tab.locator(".readout .clean").first.is_visible()


def test_the_gallery_shows_differences(opened):
    whole, added = (opened.locator(f"#gallery .{name}").first for name in ("whole", "added"))
    assert (whole.is_visible(), added.is_visible()) == (True, False)
    opened.locator("#differences").check()
    assert (whole.is_visible(), added.is_visible()) == (False, True)
    assert opened.evaluate("[...document.images].every((i) => i.naturalWidth > 0)")


def test_the_theme_is_that_of_the_system_until_it_is_chosen(opened):
    def background():
        return opened.evaluate("getComputedStyle(document.body).backgroundColor")

    seen = []
    for scheme in ("light", "dark"):
        opened.emulate_media(color_scheme=scheme)
        seen.append(background())
    for _ in range(2):  # from auto to light, and to dark
        opened.locator("#theme").click()
        seen.append(background())
    assert seen[0] != seen[1]
    assert seen[2:] == seen[:2]
