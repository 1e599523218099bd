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
    runs = [read(original, "one"), read(original, "<i>two</i>")]
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page(runs, summarise(runs)), encoding="utf-8")
    return path


@pytest.fixture
def opened(browser, file):
    """The page, open; at the end, it must have asked for nothing and complained of nothing."""
    context = browser.new_context(viewport={"width": 1100, "height": 900}, offline=True)
    tab, said, asked = context.new_page(), [], []
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto(file.as_uri())
    yield tab
    context.close()
    assert said == []
    assert [url for url in asked if not url.startswith("data:")] == [file.as_uri()]


def certified(original, eps: float) -> str:
    held = rows(original)
    return f"{100 * ((held['label'] == held['truth']) & (held['radius'] > eps)).mean():.2f}%"


def test_the_slider_moves_the_numbers(opened, original):
    slider, number = opened.locator("#epsilon"), opened.locator(".readout .proved").first
    assert number.inner_text() == certified(original, 0.1)  # the first ε of the table
    seen = set()
    for eps in (0.2, 0.35, 0.6):
        slider.evaluate("(s, v) => { s.value = v; s.dispatchEvent(new Event('input')); }", eps)
        value = float(slider.input_value())
        assert opened.locator("#epsilon-value").inner_text() == f"{value:g}"
        assert number.inner_text() == certified(original, value)
        seen.add(number.inner_text())
    assert len(seen) > 1


def test_an_attack_is_read_off_where_it_was_made_and_bounds_what_lies_beyond(opened, original):
    outcome = json.loads((original / "attack.json").read_text())
    left = opened.locator(".readout tr[data-of=part] .left").first
    measured = {eps: f"{100 * sum(flags) / len(flags):.2f}%" for eps, flags in outcome["robust"].items()}
    for eps, accuracy in measured.items():
        opened.locator(".marks button", has_text=re.compile(f"^{re.escape(eps)}$")).click()
        assert left.inner_text() == accuracy
    opened.locator(".marks button", has_text="36/255").click()
    assert left.inner_text() == f"≤ {measured['0.1']}"
    opened.locator("#epsilon").evaluate("(s) => { s.value = 0; s.dispatchEvent(new Event('input')); }")
    assert left.inner_text() == f"{100 * sum(outcome['clean']) / len(outcome['clean']):.2f}%"


def test_an_attack_on_some_images_is_held_against_the_same(opened, original):
    """certified ≤ attacked ≤ clean in every row, at every ε; and a row of all images has no attack of some."""
    held, row = rows(original), opened.locator(".readout tr[data-of=part]").first
    assert row.locator("th").inner_text().strip() == "first 40 images"
    right, seen = (held["label"] == held["truth"])[:40], set()
    for eps in (0, 0.1, 0.3, 0.5, 0.8):
        opened.locator("#epsilon").evaluate("(s, v) => { s.value = v; s.dispatchEvent(new Event('input')); }", eps)
        value = float(opened.locator("#epsilon").input_value())
        texts = [row.locator(f".{name}").inner_text() for name in ("proved", "left", "clean")]
        certified, attacked, clean = (float(text.strip("≤ %")) for text in texts)
        assert certified <= attacked <= clean
        exact = right if value == 0 else right & (held["radius"][:40] > value)
        assert (certified, clean) == (100 * exact.mean(), 100 * right.mean())
        assert opened.locator(".readout tr[data-of=whole] .left").first.inner_text() == "–"
        seen.add(texts[0])
    assert len(seen) > 2
    assert "under attack, first 40 images" in opened.locator(".choose.key").inner_text()


def test_every_radius_is_read_off_exactly(opened, original):
    """At ε = R an image is not certified, and just below it is: as R > ε says."""
    held = rows(original)
    right = np.sort(held["radius"][held["label"] == held["truth"]])
    count = "(eps) => certified(DATA.runs[0], eps)"
    for radius in right[::5]:
        assert opened.evaluate(count, float(radius)) == (right > radius).sum()
        below = float(np.nextafter(radius, 0))
        assert opened.evaluate(count, below) == (right > below).sum()


def test_the_keyboard_is_enough(opened, original):
    opened.locator("#epsilon").focus()
    before = float(opened.locator("#epsilon").input_value())
    for _ in range(3):
        opened.keyboard.press("ArrowRight")
    after = float(opened.locator("#epsilon").input_value())
    assert after > before
    assert opened.locator(".readout .proved").first.inner_text() == certified(original, after)
    assert opened.locator("#epsilon").get_attribute("aria-valuetext") == f"ε = {after:g}"
    opened.keyboard.press("Tab")  # to the first button of ε
    opened.keyboard.press("Tab")
    opened.keyboard.press("Enter")
    assert opened.locator(".marks button[aria-pressed=true]").inner_text() == "36/255"
    assert opened.locator(".readout .proved").first.inner_text() == certified(original, 36 / 255)
    opened.locator("#epsilon-chart svg").focus()
    opened.keyboard.press("ArrowRight")
    tip = opened.locator("#epsilon-chart .tip")
    assert tip.is_visible()
    assert "one: certified" in tip.inner_text()
    opened.keyboard.press("Escape")
    assert not tip.is_visible()


def test_every_control_can_be_reached_by_tab(opened):
    opened.locator("body").focus()
    reached = set()
    for _ in range(60):
        opened.keyboard.press("Tab")
        reached.add(opened.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert {"theme", "epsilon", "differences", "svg", "SUMMARY", "BUTTON"} <= reached


def test_hover_and_click(opened, original):
    chart = opened.locator("#epsilon-chart")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    opened.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 100)
    tip = chart.locator(".tip").inner_text()
    assert tip.startswith("ε = 0.")
    first = rows(original)
    clean = f"{100 * (first['label'] == first['truth'])[:40].mean():.2f}%"
    same = rf"<i>two</i>, first 40 images: certified [\d.]+%, under attack ≤ [\d.]+%, clean {clean}"
    assert re.search(same, tip)
    opened.mouse.click(box["x"] + 0.4 * box["width"], box["y"] + 100)
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


def test_names_are_text(opened):
    assert opened.locator("i:text-is('two')").count() == 0
    assert opened.locator(".readout th.whole").nth(-1).inner_text().startswith("<i>two</i>")


@pytest.fixture(scope="module")
def published(original, tmp_path_factory):
    """A page of two runs that are named after one network of the paper, at eight ε."""
    one = read(original, "one")
    told = replace(one.record.run, model="cpl-s", data="cifar10", model_args={})
    one = replace(one, record=replace(one.record, run=told))
    runs = [one, replace(one, name="a-run-whose-name-is-as-long-as-those-of-experiments")]
    path = tmp_path_factory.mktemp("page") / "published.html"
    epsilons = ("36/255", "0.2", "72/255", "0.4", "108/255", "0.6", "0.8", "1")
    path.write_text(page(runs, summarise(runs, epsilons)), encoding="utf-8")
    return path


def test_the_paper_is_drawn_once_and_in_grey(browser, published):
    tab = browser.new_page()
    tab.goto(published.as_uri())
    traces = tab.locator("#epsilon-chart g[data-look=paper]")
    assert traces.count() == 1
    assert traces.get_attribute("class") == "grey"
    tab.locator("#epsilon-chart svg").focus()
    tab.keyboard.press("Home")
    said = tab.locator("#epsilon-chart .tip").inner_text()
    assert said.count("the paper's CPL-S on cifar10, certified: 75.6% at 0") == 1
    tab.locator("input[data-hides='kind published']").uncheck()
    assert traces.count() == 0
    tab.close()


@pytest.mark.parametrize("width", [1200, 1600])
def test_eight_radii_fit(browser, published, width):
    """The last column is not cut."""
    tab = browser.new_page(viewport={"width": width, "height": 900})
    tab.goto(published.as_uri())
    box = tab.locator("#summary .scroll")
    assert box.evaluate("(b) => b.scrollWidth <= b.clientWidth")
    tab.close()


def test_certified_attacked_and_clean_are_seen_together_on_a_phone(browser, published):
    tab = browser.new_page(viewport={"width": 390, "height": 800})
    tab.goto(published.as_uri())
    box = tab.locator("#curves .scroll")
    assert box.evaluate("(b) => b.scrollWidth <= b.clientWidth")
    assert tab.locator(".readout .clean").first.is_visible()
    tab.close()


def test_an_injected_script_does_not_run(browser, file, tmp_path):
    """Were an escape ever missed, the page's own policy stands behind it."""
    broken = tmp_path / "broken.html"
    evil = "<script>document.title = 'broken'</script><img src=x onerror=\"document.title = 'broken'\">"
    broken.write_text(file.read_text(encoding="utf-8").replace("<h1>", f"{evil}<h1>"), encoding="utf-8")
    tab = browser.new_page()
    tab.goto(broken.as_uri())
    tab.wait_for_timeout(200)
    assert tab.title() != "broken"
    assert tab.locator("#epsilon-chart svg").count() == 1
    tab.close()


def test_the_gallery_shows_differences(opened):
    whole, added = (opened.locator(f"#gallery .{name}").first for name in ("whole", "added"))
    assert whole.is_visible()
    assert not added.is_visible()
    opened.locator("#differences").check()
    assert added.is_visible()
    assert not whole.is_visible()
    assert opened.evaluate("[...document.images].every((i) => i.naturalWidth > 0)")


def test_light_and_dark(opened):
    def paper():
        return opened.evaluate("getComputedStyle(document.body).backgroundColor")

    opened.emulate_media(color_scheme="light")
    light = paper()
    opened.emulate_media(color_scheme="dark")
    dark = paper()
    assert light != dark
    opened.locator("#theme").click()  # from auto to light
    assert paper() == light
    opened.locator("#theme").click()
    assert paper() == dark


@pytest.mark.parametrize("width", [320, 390, 768, 1600])
def test_no_width_is_too_narrow(opened, width):
    opened.set_viewport_size({"width": width, "height": 800})
    opened.wait_for_timeout(100)
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    drawn = opened.locator("#epsilon-chart svg").bounding_box()["width"]
    assert drawn <= width
    assert opened.locator("#epsilon-chart g[data-run] path.line").first.get_attribute("d")
