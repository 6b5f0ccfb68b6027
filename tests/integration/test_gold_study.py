"""The gold-reward study: its rewards and its figures by hand, and all stages chained on the tiny model."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from asyncrlhf.cli.main import main
from asyncrlhf.records.write.recorder import read_metrics
from tests.numeric import FLOAT32, assert_close

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "04_gold_rlhf"
MODULES = ("best_of_n", "chain", "demonstrations", "figure", "gold", "study")


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The study's own files, which are scripts of one folder and no package."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.syspath_prepend(str(FOLDER.parents[1]))
    yield {name: __import__(name) for name in MODULES}
    for name in MODULES:
        sys.modules.pop(name, None)


def test_the_gold_of_sums_is_the_distance(modules: dict[str, Any]) -> None:
    texts = ["12", " 12 ", "9", "15", "22", "99", "", "-12", "1 2", "twelve"]
    found = modules["gold"].closeness(["5+7="] * len(texts), texts, answer=["12"] * len(texts), metadata=[{}])
    assert found == pytest.approx([1.0, 1.0, 0.7, 0.7, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])


def test_the_gold_of_sentences_is_sentiment_without_repetition(modules: dict[str, Any]) -> None:
    pytest.importorskip("vaderSentiment")
    kind, cruel, neither, spam, nothing = modules["gold"].kindness(
        [""] * 5, ["What a lovely day!", "What an awful day!", "The day is long.", "lovely lovely lovely", ""]
    )
    assert kind > 0.5 and cruel < -0.4 and (neither, nothing) == (0.0, 0.0)
    (alone,) = modules["gold"].kindness([""], ["lovely"])
    assert 0 < spam < alone, "more of the same is worth less, though VADER itself calls it kinder"


def test_gains_are_paired_by_prompt(modules: dict[str, Any]) -> None:
    def evaluation(*rewards: tuple[str, float]) -> dict[str, Any]:
        return {"samples": [{"prompt": prompt, "reward": reward} for prompt, reward in rewards]}

    before = evaluation(("a", 0.0), ("a", 0.5), ("b", 1.0), ("c", 0.0))
    after = evaluation(("c", 0.5), ("a", 0.75), ("b", 1.0), ("a", 1.0))
    found = modules["chain"].compare(before, after)
    differences = [0.625, 0.0, 0.5]
    mean = sum(differences) / 3
    error = math.sqrt(sum((d - mean) ** 2 for d in differences) / 2 / 3)
    assert (found["gain"], found["standard_error"]) == (pytest.approx(mean), pytest.approx(error))
    assert (found["prompts"], found["before"], found["after"]) == (3, pytest.approx(1.25 / 3), pytest.approx(2.375 / 3))


def test_times_are_compared_at_equal_gold(modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Straight lines to the same gold, one in half of the other's time."""
    monkeypatch.setattr(modules["figure"], "SMOOTH", 1)
    steps = range(9)
    curves = pd.DataFrame(
        {"algorithm": "rloo", "mode": mode, "seed": 0, "step": s, "wall_time": s * pace, "gold": 0.5 + 0.04 * s}
        for mode, pace in (("sync", 2.0), ("async", 1.0))
        for s in steps
    )
    row = modules["figure"].times(curves).splitlines()[-1]
    assert row == "| rloo | 0 | 0.788 | 16.0 | 8.0 | 0.50 |"
    late = curves.assign(gold=curves.gold.where(curves["mode"] == "sync", 0.5))
    assert modules["figure"].times(late).splitlines()[-1] == "| rloo | 0 | 0.788 | 16.0 | never | nan |"


def test_the_best_of_n_is_that_of_every_choice_of_n(modules: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    answers = rng.normal(size=(7, 2))  # proxy, gold
    for n in (1, 2, 5, 7):
        best = [max(chosen, key=lambda pair: pair[0]) for chosen in itertools.combinations(answers.tolist(), n)]
        found = modules["best_of_n"].expected_best(np.array(sorted(answers.tolist())), n)
        assert_close(found, np.mean(best, axis=0))


# Far less of everything than tiny.yaml has, which `make rlhf` runs.
SMALLER = {
    "sft": ["sft.max_steps=24"],
    "preferences": ["preferences.num_prompts=40", "preferences.num_generations=16"],
    "reward_model": ["reward_model.num_train_epochs=2"],
    "train": ["batch_size=64", "steps=12"],
    "evaluate": ["evaluation.num_generations=4"],
}


@pytest.mark.thorough
def test_all_stages_in_a_row(
    modules: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through the command line's own main, in this process; each stage reads what the one before wrote."""
    chain, study = modules["chain"], modules["study"]

    def in_process(command: str, folder: Path, overrides: Sequence[str]) -> float:
        assert main([command, *overrides, f"run_dir={folder}"]) == 0, capsys.readouterr().err
        return 0.0

    for module in (chain, study):
        monkeypatch.setattr(module, "asyncrlhf", in_process)
    monkeypatch.chdir(FOLDER.parents[1])
    tiny = chain.Scale.read("tiny")
    scale = type(tiny)(**{**vars(tiny), **{name: [*getattr(tiny, name), *more] for name, more in SMALLER.items()}})
    study.chain(scale, tmp_path, seed=0)

    def config(stage: str) -> dict[str, Any]:
        return yaml.safe_load((tmp_path / stage / "config.yaml").read_text())

    tuned, judge = str(tmp_path / "sft" / "model"), str(tmp_path / "reward_model" / "model")
    assert config("sft")["sft"]["path"] == str(tmp_path / "demonstrations.jsonl")
    assert config("preferences")["model"]["path"] == config("reward_model")["model"]["path"] == tuned
    assert config("reward_model")["reward_model"]["path"] == str(tmp_path / "preferences" / "preferences.jsonl")
    assert config("train")["model"]["path"] == tuned
    assert config("train")["reward"]["parts"]["proxy"]["model"]["path"] == judge
    pairs = json.loads((tmp_path / "preferences" / "summary.json").read_text())
    assert 0.6 < pairs["agreement"] < 1.0, "labels follow gold, with noise"
    rows = read_metrics(tmp_path / "train" / "metrics.jsonl")
    assert [row["reward_mean"] for row in rows] == pytest.approx([row["reward/proxy"] for row in rows])
    assert all(0.0 < row["reward/gold"] < 1.0 for row in rows), "gold is logged, and not learned from"
    before, after = (
        json.loads((tmp_path / f"evaluate_{name}" / "evaluation.json").read_text()) for name in ("sft", "train")
    )
    assert_close(before["kl"]["k1_sequence"], 0.0, atol=FLOAT32)
    assert after["kl"]["k3_sequence"] > 0.0
    assert before["win_rate"] == 0.5, "the SFT model against its own answers"
    result = json.loads((tmp_path / "summary.json").read_text())
    assert result["gold"]["before"] == pytest.approx(before["reward_mean"], abs=1e-6)
    assert result["gold"]["after"] == pytest.approx(after["reward_mean"], abs=1e-6)
    assert "standard errors" in capsys.readouterr().out
