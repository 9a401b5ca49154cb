"""The page in a real browser, opened from disk without a network."""

from __future__ import annotations

import json
import os
import shutil
from itertools import pairwise

import numpy as np
import pytest

from driftproof.backtest import backtest
from driftproof.backtest.engine import Training
from driftproof.cli.evaluation import write_json
from driftproof.envs import Bars
from driftproof.report import write_report
from tests.report.folders import HOSTILE, write_hostile

sync_api = pytest.importorskip("playwright.sync_api", reason="NO BROWSER TESTS: playwright is not installed")

WIDTHS = {"phone": 390, "desktop": 1440}
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SMALLEST = 10
"""Pixels of text that can still be read."""


@pytest.fixture(scope="module")
def browser(pytestconfig):
    found = [path for name in NAMES if (path := shutil.which(name))]
    with sync_api.sync_playwright() as playwright:
        found += [path for path in [playwright.chromium.executable_path] if os.path.exists(path)]
        if not found:
            message = "NO BROWSER TESTS: there is no chromium; install it (apt-get install chromium) and test again"
            with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
                print(f"\n{'!' * len(message)}\n{message}\n{'!' * len(message)}")
            pytest.skip(message)
        # Without the sandbox, which a container's root cannot have.
        with playwright.chromium.launch(executable_path=found[0], args=["--no-sandbox"]) as started:
            yield started


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Every kind of chart, 32 members, and names that want to be more than names."""
    folder = tmp_path_factory.mktemp("runs")
    run = write_hostile(folder / "<script>window.hacked=1<", members=32)
    result = json.loads((run / "evaluation.json").read_text())
    scope = {"text": f"IN SAMPLE on {HOSTILE[0]}", "in_sample": True}
    (run / "evaluation.json").write_text(json.dumps({**result, "scope": scope}))
    write_backtest(run)
    return write_report([run], folder / "report.html")


def write_backtest(run):
    """A backtest of ten years, of which training saw six."""
    times = np.arange("2010-01-01", "2020-01-01", dtype="M8[D]").astype("M8[us]")
    close = 100 * np.exp(np.cumsum(np.random.default_rng(0).normal(0, 0.01, len(times))))
    bars = Bars(times, close, close, close, close, close, HOSTILE[0])
    training = Training((("2010-01-01", "2016-01-01"),), f"trained on {HOSTILE[0]}")
    targets = {HOSTILE[0]: np.sign(np.sin(np.arange(len(times)) / 9))}
    write_json(run / "backtest.json", backtest({HOSTILE[0]: bars}, targets, cost=0.001, training=training).to_dict())


class Visit:
    """A page that was opened, and what went wrong on it."""

    def __init__(self, browser, page_file, width):
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme="light")
        self.context.set_offline(True)
        self.context.set_default_timeout(120_000)  # of a busy machine
        self.problems = []
        self.context.route("**/*", self._only_the_file)
        self.page = self.context.new_page()
        self.page.on("console", lambda told: self.problems.append(told.text) if told.type != "log" else None)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self._file = page_file.as_uri()
        self.page.goto(self._file)
        self.drawn()

    def drawn(self):
        """Wait until all is drawn, or drawn again."""
        self.page.wait_for_selector("html[data-drawn]")

    def look(self, script):
        return self.page.evaluate(script)

    def _only_the_file(self, route):
        if route.request.url == self._file:
            return route.continue_()
        self.problems.append(f"fetches {route.request.url}")
        return route.abort()


@pytest.fixture(scope="module", params=WIDTHS)
def visit(request, browser, report):
    visit = Visit(browser, report, WIDTHS[request.param])
    yield visit
    visit.context.close()


def overlaps(boxes):
    """Pairs of neighbours in a column of texts that touch each other."""
    boxes = sorted(boxes, key=lambda box: box["top"])
    return [(a["text"], b["text"]) for a, b in pairwise(boxes) if b["top"] < a["bottom"]]


def test_nothing_goes_wrong_and_nothing_is_fetched(visit):
    assert visit.problems == []


def test_every_chart_is_drawn(visit):
    charts = visit.look(
        """[...document.querySelectorAll("[data-figure]")].map((chart) => ({
            title: chart.getAttribute("aria-label"),
            isPlot: chart.classList.contains("js-plotly-plot"),
            size: [...chart.querySelectorAll("svg.main-svg")].map((svg) => svg.getBoundingClientRect().height)[0],
            lines: [...chart.querySelectorAll(".scatterlayer .trace, .barlayer .trace, .heatmaplayer image")].length,
            points: (chart.data || []).filter((trace) => trace.visible !== false)
                .reduce((sum, trace) => sum + (trace.z || trace.y).flat().filter((y) => y !== null).length, 0),
        }))"""
    )
    assert len(charts) == visit.look("figures => JSON.parse(document.getElementById('figures').textContent).length")
    assert len(charts) > 30
    for chart in charts:
        assert chart["isPlot"], chart
        assert chart["size"] > 150, chart
        assert chart["lines"] > 0, chart
        assert chart["points"] > 0, chart


def test_the_page_is_no_wider_than_the_window(visit):
    assert visit.look("document.documentElement.scrollWidth") <= visit.look("window.innerWidth")
    sticking_out = visit.look(
        """[...document.querySelectorAll("main *, header *, footer *")]
            .filter((e) => !e.closest(".scroll, pre, svg") && e.getBoundingClientRect().right > window.innerWidth + 1)
            .map((e) => e.outerHTML.slice(0, 80))"""
    )
    assert sticking_out == []


def test_all_text_is_large_enough(visit):
    small = visit.look(
        f"""[...document.querySelectorAll("body *")]
            .filter((e) => [...e.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim()))
            .filter((e) => !["SCRIPT", "STYLE", "NOSCRIPT", "OPTION"].includes(e.tagName))
            .filter((e) => parseFloat(getComputedStyle(e).fontSize) < {SMALLEST})
            .map((e) => e.outerHTML.slice(0, 80))"""
    )
    assert small == []


def test_the_lineage_of_32_members_can_be_read(visit):
    boxes = visit.look(
        """[...document.querySelectorAll("[aria-label='Lineage'] .yaxislayer-above text, "
            + "[aria-label='Lineage'] .ytick text")].map((text) => {
            const { top, bottom, left } = text.getBoundingClientRect();
            return { text: text.textContent, top, bottom, left };
        })"""
    )
    unique = {box["text"]: box for box in boxes}
    assert set(unique) == {str(member) for member in range(32)}
    assert overlaps(unique.values()) == []
    assert min(box["left"] for box in unique.values()) >= 0


def test_findings_and_what_is_in_sample_stand_out(visit):
    found = visit.look(
        """[...document.querySelectorAll(".findings li")].map((item) => ({
            severity: item.className,
            badge: item.querySelector(".badge").textContent,
            title: item.querySelector("h4").textContent,
            line: getComputedStyle(item).borderLeftColor,
            link: item.querySelector("a")?.getAttribute("href"),
        }))"""
    )
    assert found[0]["severity"] == found[0]["badge"] == "alarm"
    assert "The evaluation is in sample" in found[0]["title"]
    assert all(visit.look(f"document.querySelector('{each['link']}') !== null") for each in found if each["link"])
    marked = visit.look(
        """[...document.querySelectorAll(".in-sample")]
            .map((e) => [getComputedStyle(e).color, e.getClientRects().length])"""
    )
    assert len(marked) >= 2, "the card and the label of the section"
    assert {colour for colour, _ in marked} == {found[0]["line"]}
    assert all(count > 0 for _, count in marked)


def test_a_backtest_shows_what_training_saw_and_can_be_read(visit):
    """In red what is in sample; figures of the agent within the window, without a date in each row."""
    section = "document.querySelector('#backtest')"
    titles = visit.look(
        f"""[...{section}.querySelectorAll("h3")].map((e) => [e.textContent, e.classList.contains("in-sample")])"""
    )
    assert ["IN SAMPLE, 2010-01-01 to 2016-01-01", True] in titles
    assert ["Out of sample, 2016-01-01 to 2019-12-31", False] in titles
    assert {"Equity", "Drawdown", "By year", "Position", "At multiples of the costs", "By regime"} <= {
        title for title, _ in titles
    }
    cut = visit.look(
        f"""[...{section}.querySelectorAll(".scroll tbody tr")].map((row) => row.cells[3].getBoundingClientRect().right
            > row.closest(".scroll").getBoundingClientRect().right + 1)"""
    )
    assert cut
    assert not any(cut)


def test_labels_beside_an_axis_do_not_touch(visit):
    columns = visit.look(
        """[...document.querySelectorAll("[data-figure]")].map((chart) => [...chart.querySelectorAll(".ytick text")]
            .map((text) => ({ text: text.textContent, ...text.getBoundingClientRect().toJSON() })))"""
    )
    assert [pair for boxes in columns for pair in overlaps(boxes)] == []


def test_names_are_only_names(visit):
    assert visit.look("window.hacked") is None
    assert visit.look("document.querySelectorAll('main img, main script, .chart a').length") == 0
    text = visit.look("document.body.innerText")
    for name in HOSTILE[:3]:
        assert name in text


def test_charts_are_sent_nowhere(visit):
    buttons = visit.look("[...new Set([...document.querySelectorAll('.modebar-btn')].map((b) => b.dataset.title))]")
    assert set(buttons) <= {"Download plot as a PNG", "Zoom", "Pan", "Reset axes"}


def test_another_colouring_of_the_lineage_can_be_chosen(visit):
    look = """[...document.querySelector("[aria-label='Lineage']").data]
        .filter((trace) => trace.type === "heatmap").map((trace) => trace.visible)"""
    shown = visit.look(look)
    assert shown == [True] + [False] * (len(shown) - 1)
    choice = visit.page.locator("figure", has=visit.page.locator("[aria-label='Lineage']")).locator("select")
    choice.select_option("learning_rate")
    assert visit.look(look) == [False] * (len(shown) - 1) + [True]
    choice.select_option("return")


def test_the_page_follows_the_systems_colours(visit):
    colours = """[getComputedStyle(document.body).backgroundColor,
        document.querySelector("[aria-label='Return']").data[2].line.color]"""
    light = visit.look(colours)
    assert_contrast(visit)
    visit.look("delete document.documentElement.dataset.drawn")
    visit.page.emulate_media(color_scheme="dark")
    visit.drawn()
    dark = visit.look(colours)
    assert_contrast(visit)
    assert light[0] != dark[0]
    assert light[1] != dark[1]
    assert visit.problems == []


def assert_contrast(visit):
    """Texts and lines can be told from what they are on."""
    for ink in ("--ink", "--muted"):
        assert contrast(visit, "--page", ink) >= 4.5
    for ink in ("--ink", "--muted", "--accent", "--alarm", "--warning"):
        assert contrast(visit, "--surface", ink) >= 4.5
    for i in range(8):
        assert contrast(visit, "--surface", f"--run{i}") >= 3


def contrast(visit, *names):
    """Of two colours, as WCAG 2 defines it."""
    luminances = []
    for name in names:
        text = visit.look(f"getComputedStyle(document.documentElement).getPropertyValue('{name}').trim()")
        channels = [int(text[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        luminances.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    low, high = sorted(luminances)
    return (high + 0.05) / (low + 0.05)
