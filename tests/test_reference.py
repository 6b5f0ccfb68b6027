"""The committed reference pages are what the code makes, and its metrics have each key once."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrlhf.cli.reference import PAGES
from asyncrlhf.records.show.metric_names import FAMILIES, find_metric

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"


@pytest.mark.parametrize("name", PAGES)
def test_committed_pages_are_those_of_the_code(name: str) -> None:
    assert (FOLDER / name).read_text() == PAGES[name](), "make reference"


def test_a_key_is_explained_once() -> None:
    names = [metric.name for family in FAMILIES for metric in family.metrics]
    assert len(names) == len(set(names))
    titles = [metric.title for family in FAMILIES for metric in family.metrics]
    assert len(titles) == len(set(titles))


def test_patterns_match_what_they_should_and_nothing_else() -> None:
    found = {
        "lag_3-4/kl": "lag_<versions>/kl",
        "generator/fast-0/latency": "generator/<replica>/latency",
        "reward/score": "reward/<part>",
        "critic_latency_p95": "<kind>_latency_p95",
        "staleness_mean": "staleness_mean",
    }
    assert {key: metric.name for key in found if (metric := find_metric(key))} == found
    for unknown in ("lag_3-4/kl/x", "staleness", "xstaleness_mean", "reward/", "generator/a/b/latency"):
        assert find_metric(unknown) is None, unknown
