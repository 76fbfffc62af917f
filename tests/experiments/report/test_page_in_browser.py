"""The report as a reader has it: in Chromium, from a file, without a network."""

import pytest

from fedpa.experiments.report.comparison import compare_groups
from fedpa.experiments.report.page import make_page
from fedpa.experiments.report.runs import find_runs, group_runs
from tests.experiments.report.browser import browser, chromium
from tests.experiments.report.made_runs import made_comparison

PROGRAM = chromium()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no chromium is installed")
CHARTS = "[...document.querySelectorAll('.chart')]"
DRAWN = f"{CHARTS}.every(c => c.querySelector('path.js-line'))"
BACKGROUND = "getComputedStyle(document.body).backgroundColor"
LIGHT, DARK = "rgb(255, 255, 255)", "rgb(20, 23, 28)"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    directory = tmp_path_factory.mktemp("report")
    groups = group_runs(find_runs([made_comparison(directory / "cmp")]))
    path = directory / "report.html"
    path.write_text(make_page(compare_groups(groups)), "utf-8")
    return path


@pytest.fixture(scope="module")
def chrome(tmp_path_factory):
    with browser(PROGRAM, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def opened(chrome, report):
    """The page anew, wide and light."""
    chrome.events.clear()
    chrome.resize(1280, 900)
    chrome.prefer("light")
    chrome.open(report)
    chrome.value("localStorage.clear()")
    chrome.wait(DRAWN)
    return chrome


def lines_of_charts(opened):
    """How many lines each chart shows."""
    return opened.value(f"{CHARTS}.map(c => c.querySelectorAll('path.js-line').length)")


def test_it_loads_alone_and_draws(opened, report):
    assert opened.complaints() == []
    assert set(opened.requested()) == {report.resolve().as_uri()}
    # A line and a band for each of three methods.
    assert opened.value("document.querySelectorAll('#chart-0-curves path.js-line').length") == 6
    # An × per evaluation, and the markers along three lines.
    points = opened.value("document.querySelectorAll('#chart-0-curves path.point').length")
    assert 3 * 2 * 30 + 3 * 5 <= points <= 3 * 2 * 30 + 3 * 10
    assert "sampling begins" in opened.value(
        "document.getElementById('chart-0-curves').textContent"
    )
    offered = "[...document.querySelectorAll('.modebar-btn')].map(b => b.dataset.title).join()"
    assert "Zoom in" in opened.value(offered)
    assert not {"Share", "Edit", "Plotly"} & set(opened.value(offered).replace(",", " ").split())


def test_a_method_is_hidden_in_all_charts(opened):
    before = lines_of_charts(opened)
    # By keyboard: the second method's box, and the space bar.
    opened.value("document.querySelector('[data-method=\"1\"]').focus()")
    press(opened, " ", 32)
    opened.wait(f"{CHARTS}.every(c => c.data.every(t => t.visible === (t.meta.method !== 1)))")
    opened.wait("document.querySelectorAll('#chart-0-curves path.js-line').length === 4")
    hidden = lines_of_charts(opened)
    assert all(after < whole for after, whole in zip(hidden, before, strict=True))
    press(opened, " ", 32)
    opened.wait("document.querySelectorAll('#chart-0-curves path.js-line').length === 6")
    assert lines_of_charts(opened) == before
    assert opened.complaints() == []


def test_numbers_on_hover_and_a_zoom_that_stays(opened):
    where = opened.value(
        "(() => { const r = document.querySelectorAll('#chart-0-curves path.point')[20]"
        ".getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2] })()"
    )
    move(opened, "mouseMoved", *where, held=False)
    opened.wait(
        "/round \\d+/.test(document.querySelector('#chart-0-curves .hoverlayer').textContent)"
    )
    ends = "document.getElementById('chart-0-curves').layout.xaxis.range.map(Math.round).join()"
    whole = opened.value(ends)
    box = opened.value(
        "(() => { const r = document.querySelector('#chart-0-curves .nsewdrag')"
        ".getBoundingClientRect(); return [r.x, r.y, r.width, r.height] })()"
    )
    left, right, middle = box[0] + box[2] * 0.3, box[0] + box[2] * 0.7, box[1] + box[3] / 2
    move(opened, "mousePressed", left, middle)
    move(opened, "mouseMoved", (left + right) / 2, middle)
    move(opened, "mouseMoved", right, middle)
    move(opened, "mouseReleased", right, middle)
    opened.wait(f"{ends} !== {whole!r}")
    zoomed = opened.value(ends)
    opened.value("document.getElementById('theme').click()")
    opened.value("document.querySelector('[data-method=\"1\"]').click()")
    assert opened.value(ends) == zoomed
    assert opened.complaints() == []


def move(opened, kind, x, y, held=True):
    button = {"button": "left", "buttons": 1, "clickCount": 1} if held else {}
    opened.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)


def press(opened, key, code):
    event = {"key": key, "code": "Space", "windowsVirtualKeyCode": code, "text": key}
    opened.call("Input.dispatchKeyEvent", type="keyDown", **event)
    opened.call("Input.dispatchKeyEvent", type="keyUp", **event)


@pytest.mark.parametrize("modern", [True, False])
def test_results_are_copied(opened, modern):
    """Also where there is no navigator.clipboard, or it refuses."""
    if modern:
        opened.value(
            "Object.defineProperty(navigator, 'clipboard', {value: "
            "{writeText: async text => { window.got = text }}})"
        )
    else:
        opened.value("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
        opened.value(
            "document.addEventListener('copy', () => { window.got = "
            "document.activeElement.value ?? getSelection().toString() })"
        )
    opened.value("document.querySelector('[data-copy=\"latex-0\"]').click()")
    opened.wait("document.getElementById('said').textContent === 'Copied'")
    assert opened.value("window.got") == opened.value(
        "document.getElementById('latex-0').textContent"
    )
    assert "\\toprule" in opened.value("window.got")


def test_the_real_clipboard_has_it(opened):
    """Pasted back: nothing in between is ours."""
    opened.value("document.querySelector('[data-copy=\"markdown-0\"]').click()")
    opened.wait("document.getElementById('said').textContent === 'Copied'")
    opened.value(
        "document.body.append(Object.assign(document.createElement('textarea'), {id: 'paste'}))"
    )
    opened.value("document.getElementById('paste').focus()")
    opened.call("Input.dispatchKeyEvent", type="keyDown", key="v", commands=["paste"])
    opened.wait("document.getElementById('paste').value.startsWith('| method | seeds |')")


def test_dark_by_button_and_by_the_systems_wish(opened, report):
    plot = "document.querySelector('#chart-0-curves .main-svg').style.background"
    line = "#chart-0-curves .scatter path.js-line[style*='2.2']"
    stroke = f'document.querySelector("{line}").style.stroke'
    assert opened.value(BACKGROUND) == LIGHT
    light = opened.value(plot), opened.value(stroke)
    opened.value("document.getElementById('theme').click()")
    assert opened.value(BACKGROUND) == DARK
    dark = opened.value(plot), opened.value(stroke)
    assert light[0] != dark[0]
    assert light[1] != dark[1]
    opened.value("document.getElementById('theme').click()")
    assert (opened.value(plot), opened.value(stroke)) == light
    opened.value("localStorage.clear()")
    opened.prefer("dark")
    opened.wait(f"{BACKGROUND} === {DARK!r}")
    assert (opened.value(plot), opened.value(stroke)) == dark
    assert opened.complaints() == []


def test_a_phone_need_not_scroll_sideways(opened, report):
    opened.resize(390, 844, mobile=True)
    opened.open(report)
    opened.wait(DRAWN)
    assert opened.value("innerWidth") == 390
    assert opened.value("document.documentElement.scrollWidth") <= 390
    # What is too wide scrolls in its own box; charts are as wide as the page.
    assert opened.value(
        "[...document.querySelectorAll('.scroll')].some(b => b.scrollWidth > b.clientWidth)"
    )
    assert opened.value(f"{CHARTS}.every(c => c.getBoundingClientRect().right <= 390)")
    smallest = (
        f"Math.min(...{CHARTS}.flatMap(c => [...c.querySelectorAll('text')])"
        ".filter(t => t.textContent).map(t => parseFloat(getComputedStyle(t).fontSize)))"
    )
    assert opened.value(smallest) >= 11


def test_text_has_contrast(opened):
    """At least 4.5 : 1, as WCAG asks of text."""
    for name in ("light", "dark"):
        opened.prefer(name)
        opened.wait(f"document.documentElement.dataset.theme === {name!r}")
        for text in ("--text", "--quiet", "--accent"):
            for ground in ("--page", "--box"):
                both = [
                    opened.value(
                        f"getComputedStyle(document.documentElement).getPropertyValue('{v}').trim()"
                    )
                    for v in (text, ground)
                ]
                assert contrast(*both) >= 4.5, (name, text, ground)


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
