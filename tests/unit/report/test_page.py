"""The report in a real browser: every chart drawn, legend and axis act on all of them, two widths hold it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from asyncrlhf.report.html import build_report
from tests.browser import CHROMIUM, Browser
from tests.unit.report.made import full_run, full_sweep
from tests.unit.report.test_timeline_and_rollouts import write_timeline

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")
WIDTHS = (1400, 390)  # a desk, a phone

PLOTS = """[...document.querySelectorAll('.plot')].map(plot => ({
  title: plot.parentElement.querySelector('b').innerText,
  paths: [...plot.querySelectorAll('.scatterlayer path')].filter(path => path.getAttribute('d').length > 4).length,
  traces: (plot.data || []).map(trace => ({name: trace.name, kind: trace.meta, x: [...trace.x], y: [...trace.y],
    color: trace.kind === 'front' ? '' : (trace.line || trace.marker).color, fill: trace.fillcolor,
    dash: (trace.line || {}).dash, symbol: (trace.marker || {}).symbol}))}))"""
# What a reader would have to scroll sideways for, and text that its box cuts off.
TOO_WIDE = """[...document.querySelectorAll('body *')].filter(one => {
  const box = one.getBoundingClientRect(), style = getComputedStyle(one);
  return box.width && !one.closest('#js-plotly-tester') && (box.right > innerWidth + 1 || box.left < -1
    || (style.overflowX !== 'visible' && one.tagName !== 'svg' && one.scrollWidth > one.clientWidth + 1));
}).map(one => one.outerHTML.slice(0, 120))"""
# Labels of an axis that lie over each other.
OVERLAPS = """[...document.querySelectorAll('.plot')].flatMap(plot => ['.xtick text', '.ytick text'].flatMap(kind => {
  const boxes = [...plot.querySelectorAll(kind)].map(text => text.getBoundingClientRect());
  return boxes.flatMap((a, i) => boxes.slice(i + 1).filter(b =>
    a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1).map(() => kind));
}))"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = Browser()
    try:
        yield found
    finally:
        found.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of one run, of nine configurations with two seeds, and of a sweep."""
    folder = tmp_path_factory.mktemp("pages")
    many = [
        full_run(folder / "many" / f"e{eta}s{seed}", seed=seed, **{"async": {"max_staleness": eta}})
        for eta in range(9)
        for seed in (0, 1)
    ]
    one = full_run(folder / "one")
    write_timeline(one, 3)
    return {
        "run": build_report([one]),
        "many": build_report(many, folder / "out"),
        "sweep": build_report([full_sweep(folder / "sweep")]),
    }


def opened(browser: Browser, page: Path, width: int = 1400) -> list[dict[str, Any]]:
    browser.open(page, width)
    return charts(browser)


def charts(browser: Browser) -> list[dict[str, Any]]:
    """What every chart shows, once all are drawn."""
    browser.wait_for("document.body.dataset.drawn === 'yes'")
    found: list[dict[str, Any]] = browser.evaluate(PLOTS)
    return found


def click(browser: Browser, selector: str) -> None:
    browser.evaluate(f"document.querySelector({json.dumps(selector)}).click()")


@pytest.mark.in_turn
@pytest.mark.parametrize("kind", ["run", "many", "sweep"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.more_but(every=3)
def test_every_chart_is_drawn_and_nothing_is_cut_off(
    browser: Browser, pages: dict[str, Path], kind: str, width: int
) -> None:
    drawn = opened(browser, pages[kind], width)
    assert len(drawn) > 25
    assert [chart["title"] for chart in drawn if not chart["traces"] or not chart["paths"]] == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(TOO_WIDE) == []
    assert browser.evaluate(OVERLAPS) == []
    assert browser.errors == [] and browser.requests == []
    looks: dict[str, set[tuple[Any, ...]]] = {}  # the same in every chart, and unlike any other
    for chart in drawn:
        for trace in chart["traces"]:
            if trace["kind"] == "line":
                looks.setdefault(trace["name"], set()).add((trace["color"], trace["dash"], trace["symbol"]))
    assert all(len(found) == 1 for found in looks.values())
    assert browser.evaluate("page.series.length") == len(looks) == len(set.union(*looks.values()))
    colors = {(t["name"], t["color"]) for chart in drawn for t in chart["traces"] if t["kind"] in ("points", "faint")}
    assert colors <= {(name, color) for name, found in looks.items() for color, _, _ in found}


@pytest.mark.in_turn
@pytest.mark.more
def test_a_click_hides_a_series_in_every_chart_and_brings_it_back(browser: Browser, pages: dict[str, Path]) -> None:
    before = opened(browser, pages["sweep"])
    label = browser.evaluate("page.series[1].label")
    had = sum(trace["name"] == label for chart in before for trace in chart["traces"])
    points = {chart["title"]: sum(len(trace["x"]) for trace in chart["traces"]) for chart in before}
    assert had > 20 and browser.evaluate("document.querySelectorAll('[data-series=\"1\"]:not([hidden])').length") > 0
    click(browser, "[data-toggle='1']")
    after = charts(browser)
    assert [chart["title"] for chart in after for trace in chart["traces"] if trace["name"] == label] == []
    fewer = {chart["title"] for chart in after if sum(len(t["x"]) for t in chart["traces"]) < points[chart["title"]]}
    timed = {"Quality against wall-clock"}  # the series did not have the machine alone
    assert fewer == set(points) - timed
    assert browser.evaluate("document.querySelectorAll('[data-series=\"1\"]:not([hidden])').length") == 0
    click(browser, "[data-toggle='1']")
    assert charts(browser) == before

    click(browser, ".name")  # a method with all its settings
    family = browser.evaluate("document.querySelector('.name').innerText")
    assert not {t["name"] for chart in charts(browser) for t in chart["traces"] if t["name"].startswith(f"{family},")}
    browser.evaluate(
        "document.querySelector('[data-toggle=\"0\"]').dispatchEvent(new MouseEvent('dblclick', {bubbles: true}))"
    )
    names = {t["name"] for chart in charts(browser) for t in chart["traces"]}
    assert names == {browser.evaluate("page.series[0].label")}
    click(browser, "[data-every='hide']")
    assert all(chart["traces"] == [] for chart in charts(browser)) and browser.errors == []
    assert browser.evaluate("document.querySelector('[data-for-axis]').hidden") is True
    click(browser, "[data-axis='wall_time']")
    alone = "(async, max_staleness 4, sync|sync, async, max_staleness 4)"  # by staleness, which is drawn at random
    assert re.search(f"over wall-clock compare {alone} alone", browser.evaluate("document.body.innerText"))


@pytest.mark.in_turn
@pytest.mark.more
def test_the_axis_switch_changes_every_curve(browser: Browser, pages: dict[str, Path]) -> None:
    frame = pd.read_json(pages["run"].parents[1] / "metrics.jsonl", lines=True)
    known = frame.reward_mean.notna()
    wanted = {
        "step": frame.step,
        "samples_trained": frame.sequences.cumsum(),
        "tokens_trained": frame.response_tokens.cumsum(),
        "wall_time": frame.wall_time,
    }
    opened(browser, pages["run"])
    seen = []
    for axis, x in wanted.items():
        click(browser, f"[data-axis='{axis}']")
        drawn = {chart["title"]: chart["traces"] for chart in charts(browser)}
        raw = next(trace for trace in drawn["Reward"] if trace["kind"] == "faint")
        np.testing.assert_allclose(raw["x"], x[known], rtol=1e-4)
        np.testing.assert_allclose(raw["y"], frame.reward_mean[known], rtol=1e-4)
        curves = {title: traces for title, traces in drawn.items() if not title.endswith(("by lag", "by layer"))}
        ends = {title: traces[-1]["x"][-1] for title, traces in curves.items()}
        seen.append(ends)
        assert browser.evaluate("document.querySelector('.xtitle').textContent") == browser.evaluate(
            f"page.axes.find(one => one.name === '{axis}').title"
        )
    assert len(seen[0]) > 20
    assert [title for title in seen[0] if len({round(ends[title], 3) for ends in seen}) < len(seen)] == []
    assert browser.errors == []


def test_a_closed_timeline_is_drawn_when_it_is_opened(browser: Browser, tmp_path: Path) -> None:
    runs = [full_run(tmp_path / f"r{seed}", seed=seed) for seed in range(5)]
    for run in runs:
        write_timeline(run, 12)
    opened(browser, build_report(runs, tmp_path / "out"))
    bars = "[...document.querySelectorAll('.timeline .js-plotly-plot .bars path')].length"
    assert browser.evaluate("document.querySelectorAll('details').length") == 5
    assert browser.evaluate("document.querySelectorAll('.timeline').length") == 0
    browser.evaluate("document.querySelectorAll('summary')[3].click()")
    browser.wait_for(f"{bars} === 12")
    assert browser.evaluate("document.querySelector('.timeline .js-plotly-plot').getBoundingClientRect().width") > 600
    for _ in range(2):  # closed and opened again, it stays
        browser.evaluate("document.querySelectorAll('summary')[3].click()")
    assert browser.evaluate(bars) == 12 and browser.errors == []
