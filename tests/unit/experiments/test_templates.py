"""Templates on equal devices: each device has its part, what does not fit is refused, a thinned run costs the same."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrlhf.errors import ConfigError
from asyncrlhf.planner.memory import generator_bytes
from asyncrlhf.planner.shapes import Workload, cluster_of

bench = importlib.import_module("experiments.08_templates.bench")
MODELS, TEMPLATES, Scene, TemplateCosts = bench.MODELS, bench.TEMPLATES, bench.Scene, bench.TemplateCosts
LENGTHS = Workload(512, 1024, 0.6, 4096)
SMALL = Scene(MODELS["llama-3-8b"], cluster_of("H100", 8), LENGTHS, 256)
LARGE = Scene(MODELS["llama-3-70b"], cluster_of("H100", 10_000), LENGTHS, 2048)
COLOCATED, IN_STEP, FUSED, ONE_STEP, *_, LAG_8 = TEMPLATES


@pytest.mark.parametrize("scene", [SMALL, LARGE], ids=["8", "10000"])
@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)
def test_all_devices_are_dealt_out_and_hold_their_part(scene, template) -> None:  # type: ignore[no-untyped-def]
    split, devices = scene.split(template), scene.cluster.devices
    if template.turns:
        assert (split.generating, split.reward, split.ranks) == (devices,) * 3
    else:
        assert split.generating + split.reward + split.ranks == devices
    assert 1 <= scene.slots(split) <= 256
    assert max(scene.memory(split).values()) <= 0.92 * scene.cluster.device.memory


def test_a_split_is_the_best_of_all_in_closed_form() -> None:
    """In step the sum of the stages counts, else the slowest of them."""
    fits = [s for s in SMALL.splits() if SMALL.learner(s).refusal(80e9, "") is None]
    assert len(fits) > 10
    assert sum(SMALL.stages(SMALL.split(IN_STEP))) == min(sum(SMALL.stages(split)) for split in fits)
    free = [max(SMALL.stages(replace(split, batches=9))) for split in fits]
    assert max(SMALL.stages(SMALL.split(LAG_8))) == min(free)


def test_parts_that_take_turns_leave_the_cache_what_the_learner_does_not_hold() -> None:
    scene = replace(SMALL, cluster=cluster_of("L40S", 8), batch=2048)
    split = scene.split(COLOCATED)
    assert 1 < scene.slots(split) < scene.slots(replace(split, turns=False))
    own = scene.learner(split).parts["weights and optimizer"] + 2 * scene.shape.parameters
    assert own + scene.slots(split) * scene.context * scene.shape.kv_bytes <= 0.92 * 48e9


def test_as_many_slots_as_fit() -> None:
    fits = bench.slots_that_fit(MODELS["llama-3-8b"], 80e9, 2048, 1)
    held = [generator_bytes(MODELS["llama-3-8b"], n * 2048).refusal(80e9, "A replica") for n in (fits, fits + 1)]
    assert held[0] is None and held[1] is not None


def test_a_model_that_no_device_holds_is_refused() -> None:
    few = replace(LARGE, cluster=cluster_of("H100", 8), batch=256)
    with pytest.raises(ValueError, match="8 H100 do not hold the learner"):
        few.split(ONE_STEP)
    with pytest.raises(ValueError, match="no replica inside a node of 4 A10 holds the model"):
        _ = replace(LARGE, cluster=cluster_of("A10", 8)).tensor


def test_a_thinned_run_costs_what_the_whole_one_does() -> None:
    """One rollout of 4 stands for 4: the same seconds of an iteration, a prompt, a step and a call."""
    split = SMALL.split(ONE_STEP)
    whole, thin = (TemplateCosts(SMALL, split, 0, 1, thin) for thin in (1, 4))
    assert thin.decode(8 / 2, 600) == whole.decode(32 / 2, 600)
    assert thin.prefill(9) == pytest.approx(4 * whole.prefill(9))
    assert thin.train([100, 200]) == whole.train([100, 200] * 4)
    assert thin.score("reward", 8, 8 * 100) == whole.score("reward", 32, 32 * 100)
    assert LARGE.thin == 8 and SMALL.thin == 1
    assert LARGE.batch % (LARGE.thin * LARGE.group) == 0


def test_chunks_hide_all_but_their_last_half() -> None:
    """Only while the reward's devices keep up with what is sampled."""
    split = SMALL.split(FUSED)
    read, chunked = (TemplateCosts(SMALL, split, chunk, 1).score("reward", 4, 4 * 2000) for chunk in (0, 256))
    assert chunked < 0.1 * read
    generation, reward, _ = SMALL.stages(split)
    assert reward < generation


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--devices", "8,nine"], "--devices 8,nine: invalid literal"),
        (["--devices", "12"], "12 devices do not fill nodes of 8"),
        (["--batch", "100"], "--batch 100 are no whole groups of 8"),
    ],
)
def test_nonsense_is_refused_in_one_sentence(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        bench.run(words)


@pytest.mark.thorough
def test_templates_keep_their_lag_and_those_that_overlap_are_quicker(tmp_path: Path) -> None:
    rows = {row["template"]: row for row in bench.run(["--batch", "64", "--out", str(tmp_path / "rows.csv")])}
    step, staleness = ({name: row[key] for name, row in rows.items()} for key in ("step_seconds", "staleness"))
    assert all(staleness[name] == 0 for name in rows if name.startswith("sync"))
    assert staleness["one-step"] == 1
    assert all(staleness[f"async, lag {lag}"] <= lag for lag in (1, 2, 4, 8))
    assert step["sync, fused chunks"] < step["sync, disaggregated"]
    assert step["async, lag 4"] < step["one-step"] < step["sync, disaggregated"]
