"""Runs that sample from part of the cache: the distance is told apart from staleness, and the record holds."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from asyncrlhf.actors.messages import Collected, RolloutBundle
from asyncrlhf.actors.worker import describe
from asyncrlhf.cli.main import main
from asyncrlhf.types import Prompt, Rollout
from tests.loop import run

CACHE = "generator.cache={policy:chunk_sink,share:0.5,window:6,every:3,compare_every:2}"
LONG = ("generator.max_completion_length=48", "generator.ignore_eos=true", "runtime=local", "steps=5")


@pytest.mark.parametrize("way", ["in_flight", "interrupt"])
def test_a_run_tells_what_its_smaller_cache_changes(tmp_path: Path, way: str) -> None:
    """Under both ways to go on after a load; where nothing has gone yet, the sampler is the policy."""
    done = run(tmp_path, *LONG, CACHE, "async.max_staleness=2", f"async.on_weight_update={way}")
    rows = done.metrics
    found = [row for row in rows if "cache_kl" in row]
    assert found and all(0.4 < row["cache_kept_fraction"] <= 0.56 for row in rows)
    assert max(row["cache_kl"] for row in found) > 1e-7
    assert all(row["cache_kl/1"] < 1e-9 for row in found if "cache_kl/1" in row), "12 of at most 24 tokens kept"
    assert all(row["cache_ratio_low"] <= 1.0 + 1e-6 for row in found)
    assert max(row["staleness_max"] for row in rows) > 0
    whole = run(tmp_path / "whole", *LONG, "async.max_staleness=2")
    assert not any(key.startswith("cache_") for row in whole.metrics for key in row)


def test_what_an_engine_measured_reaches_the_controller() -> None:
    three = np.arange(3)
    prompt = Prompt("", "", three + 1)
    rollout = Rollout(0, 0, prompt, three, three * -0.5, three * 0, "length", measured={"cache_kl": 0.5})
    (info,) = pickle.loads(pickle.dumps(Collected(describe([rollout])))).finished
    assert info.logged == {"cache_kl": 0.5}
    (same,) = pickle.loads(pickle.dumps(RolloutBundle([rollout])))
    assert same.measured == {"cache_kl": 0.5}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["generator.cache=chunksink"], "chunksink is not known"),
        (["generator.cache=window"], "keeps 4 of at most 16 response tokens"),
        (["generator.cache=window", "generator.engine=fake", "generator.max_completion_length=200"], "engine=hf"),
    ],
)
def test_nonsense_ends_before_anything_starts(
    words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *words]) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1 and not list(tmp_path.iterdir())
