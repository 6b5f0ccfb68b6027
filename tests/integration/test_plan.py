"""``asyncrlhf plan``: what it writes is run by ``train``, and wrong input is one sentence."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager

from asyncrlhf.cli.main import main
from asyncrlhf.config.compose import compose_config, load_config
from asyncrlhf.config.run_config import KEEPS_MEMORY
from asyncrlhf.errors import ConfigError
from asyncrlhf.orchestrator.run import train
from asyncrlhf.planner.choose import Space
from asyncrlhf.planner.layout import Layout
from asyncrlhf.planner.ranking import Subject, estimate
from asyncrlhf.planner.shapes import ModelShape, Workload, catalogue, nodes_for
from asyncrlhf.planner.tables import Fitted
from asyncrlhf.simulator.given import changed
from asyncrlhf.simulator.plan import SimulatedRuns, Task, simulated_run, this_machine
from asyncrlhf.simulator.plan_files import experiment
from tests.browser import CHROMIUM, Browser
from tests.unit.report.test_page import TOO_WIDE, WIDTHS

SOURCES = dict.fromkeys(("decode", "train", "submit", "collect", "load"), "fitted")


def test_the_file_of_a_plan_trains_and_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Costs of the local runtime's own clock: the run does what the plan said, and the files say what it was."""
    Fitted((0.05, 0.0, 0.0), (0.5, 0.0), sources=SOURCES).save(tmp_path / "profile.json", {})
    out = tmp_path / "plans" / "mine"
    words = ["steps=16", "batch_size=16", "num_generations=4", "runtime=local", "generator.slots=16"]
    clock = ["generator.virtual_step_seconds=0.05", "learner.virtual_step_seconds=0.5", "task.heldout_size=8"]
    given = ["--profile", f"{tmp_path}/profile.json", "--cores", "2", "--mean-length", "4", "--simulate", "2"]
    keep = ["--keep", "slots=16", "--keep", "quality=max_staleness=2", "--keep", "placement=auto"]
    monkeypatch.setattr("asyncrlhf.simulator.plan.SAY_EVERY", 0.0)
    assert main(["plan", *given, *keep, "--out", str(out), "weights.publish_every=1", *words, *clock]) == 0
    said, progress = capsys.readouterr()
    lines = [line for line in progress.splitlines() if "runs are simulated" in line]
    assert lines and lines[0].startswith("1 of at most") and lines[-1].startswith(f"{len(lines)} of at most")
    assert "predicts staleness, not reward" in said
    plan = json.loads(out.with_suffix(".json").read_text())
    layout = plan["layout"]
    assert (layout["replicas"], layout["ranks"], layout["slots"]) == (1, 1, 16) and layout["max_staleness"] == 2
    page = out.with_suffix(".html").read_text()
    assert "Seconds per step against staleness" in page and "generating" in page
    if CHROMIUM is not None:
        assert_drawn(out.with_suffix(".html"))

    config = load_config([f"--config-dir={tmp_path}/plans", "experiment=mine", "logging.wandb=disabled"])
    assert config.async_.bound == layout["max_staleness"] and config.batch_size == 16
    assert "seed" not in yaml.safe_load((tmp_path / "plans" / "experiment" / "mine.yaml").read_text())
    quiet = ["logging.progress=none", "logging.report=false", "logging.wandb=disabled", f"run_dir={tmp_path}/run"]
    train(load_config([f"--config-dir={tmp_path}/plans", "experiment=mine", *quiet]))
    assert main(["plan", "--compare", f"{out}.json", f"{tmp_path}/run"]) == 0
    said = capsys.readouterr().out
    assert "step_seconds" in said and "within 10% of the plan" in said


def test_a_long_plan_says_how_far_it_is_and_a_short_one_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    told = SimulatedRuns(40, lambda: now[0])
    for step_seconds in (0.5, 0.2, 0.3):
        now[0] += 3.0
        told({"step_seconds": step_seconds})
    assert capsys.readouterr().err == "2 of at most 40 runs are simulated; the shortest step so far takes 0.2 s.\n"


@pytest.mark.more_but(every=3)
def test_a_run_too_short_for_costs_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["runtime=local", "steps=12", "batch_size=16", "num_generations=4", "task.heldout_size=8", "logging=quiet"]
    train(load_config([*run, "generator.engine=fake", f"run_dir={tmp_path}/run"]))
    for command in ("simulate", "plan", "profile"):
        assert main([command, "--from", f"{tmp_path}/run"]) == 2
        said = capsys.readouterr().err
        assert said == f"asyncrlhf: {tmp_path}/run is too short: costs need steps=20 or more, and it has 12.\n"


@pytest.mark.parametrize("command", ["simulate", "plan", "profile"])
def test_help_shows_how_the_command_is_used(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    usage = capsys.readouterr().out.splitlines()[0]
    assert usage.startswith(f"usage: asyncrlhf {command} ") and usage.endswith(" [overrides]")
    assert "--from RUN" in usage and "--out" in usage


def assert_drawn(page: Path) -> None:
    """In a real browser, on a desk and on a phone."""
    browser = Browser()
    try:
        for width in WIDTHS:
            browser.open(page, width)
            browser.wait_for("[...document.querySelectorAll('.js-plotly-plot')].every(p => p.querySelector('.xtick'))")
            assert browser.evaluate("document.querySelectorAll('.scatterlayer .point').length") >= 1
            assert browser.evaluate("document.querySelectorAll('.barlayer .point, .bars .point').length") > 5
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            assert browser.evaluate(TOO_WIDE) == [] and browser.errors == [] and browser.requests == []
    finally:
        browser.close()


def test_two_groups_of_devices_name_the_nodes_of_each_side(tmp_path: Path) -> None:
    clusters = (nodes_for("H100", 8), nodes_for("A100-40GB", 8))
    layout = Layout(learner_on=0, generators_on=1)
    work = Workload(8.0, 40.0, 0.8, 400)
    shape = ModelShape(1, 8, 8, 8, 1, 1, 8)
    subject = Subject(shape, work, 4, clusters, layout, None, ("reference",))
    task = Task(compose_config([], None), subject, Space([], [], [], {}), gpus=True)
    expected = {"learner": "H100", "generator": "A100", "reference": "A100"}  # as Ray labels them
    config = changed(task.settings, *task.overrides(layout))
    assert {kind: config.cluster.labels_for(kind) for kind in expected} == {
        kind: {"ray.io/accelerator-type": name} for kind, name in expected.items()
    }
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "two.yaml").write_text(experiment(config, ["words"]))
    assert load_config([f"--config-dir={tmp_path}", "experiment=two"]).cluster == config.cluster
    alone = replace(task, subject=replace(subject, clusters=clusters[:1]))
    assert changed(task.settings, *alone.overrides(replace(layout, generators_on=0))).cluster.node_labels is None


@pytest.mark.parametrize(
    ("own", "tensor", "transport"),
    [("auto", 8, "relay"), ("auto", 1, "auto"), ("collective", 8, "collective")],
    ids=["workers", "no workers", "the user's"],
)
def test_a_plan_relays_weights_to_replicas_with_workers(own: str, tensor: int, transport: str) -> None:
    """Without a relay the learner's link would carry them once for each replica."""
    shape = ModelShape(80, 8192, 28672, 128256, 64, 8, 128)
    work, layout = Workload(200.0, 500.0, 0.8, 2000), Layout("separate", 4, tensor, ranks=8, sharding="3")
    settings = compose_config([f"weights.transport={own}"], None)
    task = Task(
        settings,
        Subject(shape, work, 4, (nodes_for("H100", 64),), layout, transport=own),
        Space([], [], [], {}),
        gpus=True,
    )
    assert changed(settings, *task.overrides(layout)).weights.transport == transport


@pytest.mark.in_turn
@pytest.mark.more
@pytest.mark.parametrize(
    "cut",
    [
        {"learner.tensor_parallel_size": 2, "learner.sharding": "fsdp2"},
        pytest.param({"learner.context_parallel_size": 2}, marks=pytest.mark.thorough),
        pytest.param({"learner.pipeline_parallel_size": 2, "learner.sharding": "none"}, marks=pytest.mark.thorough),
        pytest.param(
            {"learner.backend": "deepspeed", "learner.zero_stage": 2, "learner.sequence_parallel_size": 2},
            marks=pytest.mark.thorough,
        ),
    ],
)  # fmt: skip
def test_a_learner_may_have_more_ranks_than_a_batch_has_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: dict[str, Any]
) -> None:
    """A batch of two groups on four ranks: each group is a share of two ranks, which the plan's file says to train.
    Configs are made for few of the hundreds of layouts: learners that keep their memory share no devices."""
    made = []
    monkeypatch.setattr("asyncrlhf.simulator.plan.changed", lambda *asked: made.append(asked) or changed(*asked))
    given = [f"{key}={value}" for key, value in cut.items()]
    words = ["batch_size=16", "num_generations=8", "learner.ranks=4", *given]
    where = ["--gpus", "8", "--device", "L4", "--per-node", "8", "--simulate", "2"]
    assert main(["plan", *where, "--mean-length", "40", "--out", str(tmp_path / "cut"), *words]) == 0
    config = load_config([f"--config-dir={tmp_path}", "experiment=cut"])
    assert config.learner.ranks == 4 and config.learner.shares == 2
    assert len(made) < 120, "30 ms each"
    for key, value in cut.items():
        assert getattr(config.learner, key.partition(".")[2]) == value


@pytest.mark.parametrize(
    ("learner", "words"), [({"learner_pipeline": 2}, ()), ({"sharding": "2"}, ()), ({}, ("cluster.offload=false",))]
)
def test_what_plan_refuses_without_a_config_the_config_refuses(learner: dict[str, Any], words: tuple[str, ...]) -> None:
    subject = Subject(
        ModelShape(1, 8, 8, 8, 1, 1, 8), Workload(8.0, 40.0, 0.8, 400), 8, (nodes_for("H100", 2),), Layout()
    )
    task = Task(compose_config(["batch_size=16", *words], None), subject, Space([], [], [], {}), gpus=True)
    layout = Layout("flatten", ranks=2, replicas=2, batch_size=16, **learner)
    with pytest.raises(ConfigError, match=re.escape(KEEPS_MEMORY)):
        changed(task.settings, *task.overrides(layout))


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("A10", "NVIDIA A10"), ("A100-40GB", "NVIDIA A100-SXM4-40GB"), ("A100", "NVIDIA A100-SXM4-80GB"),
        ("B200", "NVIDIA B200"), ("H100", "NVIDIA H100 80GB HBM3"), ("H20", "NVIDIA H20"), ("H200", "NVIDIA H200"),
        ("L4", "NVIDIA L4"), ("L40S", "NVIDIA L40S"), ("RTX4090", "NVIDIA GeForce RTX 4090"),
    ],
)  # fmt: skip
def test_devices_have_the_label_that_ray_gives_them(device: str, said: str) -> None:
    """``said``: the name in NVIDIA's driver."""
    given = NvidiaGPUAcceleratorManager._gpu_name_to_accelerator_type(said)
    assert catalogue()[device].get("accelerator_type", device) == given


@pytest.mark.parametrize(("bound", "training"), [(0, 0.5), pytest.param(2, 0.05, marks=pytest.mark.thorough)])
def test_the_closed_forms_agree_with_the_controller(tmp_path: Path, bound: int, training: float) -> None:
    """A step in which generation, its longest response, training and publishing follow one another; and one that the
    generators' speed decides."""
    costs = Fitted((0.01, 0.001, 0.0), (training, 0.0), snapshot=0.1, transfer=0.3, load=0.2)
    work = Workload(8.0, 40.0, 0.8, 400)
    layout = Layout("auto", slots=16, batch_size=16, max_staleness=bound)
    subject = Subject(ModelShape(1, 8, 8, 8, 1, 1, 8), work, 4, (this_machine(2),), layout, costs)
    words = ["num_generations=4", "generator.max_completion_length=400", "task.max_prompt_length=32"]
    task = Task(compose_config(words, None), subject, Space([], [], [], {}), gpus=False)
    found = simulated_run(task, layout, 0, tmp_path / "run")
    assert found["step_seconds"] == pytest.approx(estimate(layout, subject).step, rel=0.12)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give one of --from, --profile and --gpus"),
        (["--gpus", "8"], "--gpus and --device belong together"),
        (["--gpus", "8,8", "--device", "H100", "--mean-length", "9"], "do not describe groups"),
        (["--gpus", "8", "--device", "H1000", "--mean-length", "9"], "H1000 is not a device"),
        (["--gpus", "8", "--device", "H100"], "no response lengths are known"),
        (["--gpus", "8", "--device", "H100", "--mean-length", "9", "--keep", "speed=2"], "speed=2 is not NAME<=VALUE"),
        (["--gpus", "8", "--device", "H100", "--mean-length", "9", "--simulate", "0"], "--simulate 0 is too small"),
        (["--gpus", "8", "--device", "H100", "--mean-length", "9", "model.path=a/b"], "is not a folder here"),
        (
            ["--gpus", "1", "--device", "H100", "--mean-length", "9", "cluster=separate"],
            "no layout is left to choose from",
        ),
        (["--compare", "nowhere.json", "nowhere"], "nowhere.json is not a plan"),
        (["--out", "/proc/x/", "--gpus", "x", "--device", "H100"], "do not describe groups"),
    ],
)
def test_nonsense_is_one_sentence(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.strip().splitlines()) == 1
