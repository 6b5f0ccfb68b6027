"""Runs that sample from part of the cache: the distance is told apart from staleness, and the record holds."""

from __future__ import annotations

import pickle
import re
from html import escape
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from asyncrlhf.actors.messages import Collected, RolloutBundle
from asyncrlhf.actors.worker import describe
from asyncrlhf.cli.main import main
from asyncrlhf.records.write.rollout_tokens import TOKENS_SCHEMA, TokenRecord
from asyncrlhf.report import kept_tokens
from asyncrlhf.report.html import build_report
from asyncrlhf.report.load import Run
from asyncrlhf.types import Prompt, Rollout
from tests.loop import run

CACHE = "generator.cache={policy:chunk_sink,share:0.5,window:6,every:3,compare_every:2}"
LONG = ("generator.max_completion_length=48", "generator.ignore_eos=true", "runtime=local", "steps=5", "batch_size=32")


@pytest.mark.in_turn
@pytest.mark.parametrize("way", ["in_flight", "interrupt"])
@pytest.mark.more_but("in_flight")
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


@pytest.mark.thorough
def test_the_report_shows_what_stayed(tmp_path: Path) -> None:
    """Its dark tokens are those that the record says stayed, and these are as many as the metrics say."""
    cache = "generator.cache={policy:chunk_sink,share:0.5,window:6,every:3,compare_every:1}"
    run(tmp_path, *LONG, cache, "async.max_staleness=1", "logging.rollout_tokens=4")
    page = build_report([tmp_path]).read_text()
    rows = pq.read_table(tmp_path / "rollout_tokens").to_pylist()
    rows = {row["rollout_id"]: row for row in rows if row["stayed"]}
    heads = [int(found) for found in re.findall(r"step \d+, rollout (\d+), reward", page)]
    pictures = re.findall(r'<div class="stayed">(.*?)</div>', page, re.DOTALL)
    assert len(heads) == len(pictures) == kept_tokens.PICTURES <= len(rows)
    for number, picture in zip(heads, pictures, strict=True):
        lines, row = picture.split("\n"), rows[number]
        drawn, places = {}, dict(row["stayed"])
        for line in lines:
            named, _, text = line.removeprefix("<i>").partition("</i>  ")
            place, _, alike = named.partition(" and ")
            drawn[place := place.strip()] = text
            bits = places[place]
            assert list(places.values()).count(bits) == 1 + int(alike.removesuffix(" like it").strip() or 0)
            texts = zip(row["tokens"], bits, strict=True)
            assert text == "".join(f"<b>{escape(token)}</b>" if kept else escape(token) for token, kept in texts)
            assert sum(bits) == 24 and all(bits[-6:])
        assert len(drawn) == len(lines) == len({tuple(bits) for bits in places.values()})
        assert 1 < len(lines) <= 4 + 1, "one layer is early"
    whole = tmp_path / "whole"
    done = run(whole, *LONG, "async.max_staleness=1", "logging.rollout_tokens=4")
    assert not any(key.startswith("cache_") for row in done.metrics for key in row)
    assert "stayed" not in build_report([whole]).read_text()


def test_no_token_leaves_its_place_in_the_picture(tmp_path: Path) -> None:
    """Whatever it says; long responses and many heads are cut, and the page says so."""
    record = TokenRecord(tmp_path / "rollout_tokens", 0, lambda: None)
    record._pieces = lambda ids: ["<b>\n" if i % 2 else "</div>" for i in ids]  # type: ignore[assignment]
    row = {name: None for name in TOKENS_SCHEMA.names if name not in ("step", "rank")}
    row |= {"response_ids": range(500), "prompt": "", "reward": 0.5}
    place = np.arange(500)
    stayed = {f"layer {layer}, head 0": (place % 4 == 0) | (place == 401 + 2 * layer) for layer in range(40)}
    record.add(3, [row | {"rollout_id": i, "stayed": stayed if i else None} for i in range(2)])
    record.close()
    found = kept_tokens.section(Run(tmp_path, "made", [], {}, {}, None))
    assert "1 of 1 recorded rollouts" in found and "shown: 16 of 40 different ones, the first 400 tokens" in found
    assert "step 3, rollout 1, reward 0.500: 126 of 500 tokens stay" in found
    assert found.count("<div") == found.count("</div>") == 1 and found.count("<b>&lt;/div&gt;</b>") == 16 * 100
    assert "&lt;b&gt;\N{MIDDLE DOT}" in found
    (old,) = (tmp_path / "rollout_tokens").glob("*.parquet")
    pq.write_table(pq.read_table(old).drop_columns(["stayed"]), old)
    assert kept_tokens.section(Run(tmp_path, "made", [], {}, {}, None)) == ""


def test_what_an_engine_measured_reaches_the_controller() -> None:
    three = np.arange(3)
    prompt = Prompt("", "", three + 1)
    rollout = Rollout(
        0, 0, prompt, three, three * -0.5, three * 0, "length", measured={"cache_kl": 0.5}, stayed={"a": three > 0}
    )
    (info,) = pickle.loads(pickle.dumps(Collected(describe([rollout])))).finished
    assert info.logged == {"cache_kl": 0.5}
    (same,) = pickle.loads(pickle.dumps(RolloutBundle([rollout])))
    assert same.measured == {"cache_kl": 0.5} and same.stayed["a"].tolist() == [False, True, True]


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
