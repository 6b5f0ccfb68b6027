"""``asyncrlhf plan``: what it writes is run by ``train``, and wrong input is one sentence."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest
import yaml

from asyncrlhf.cli.main import main
from asyncrlhf.cli.plan import Task, simulated_run
from asyncrlhf.cli.plan_space import clusters_of
from asyncrlhf.config.compose import compose_config, load_config
from asyncrlhf.orchestrator.run import train
from asyncrlhf.planner.choose import Space
from asyncrlhf.planner.layout import Layout
from asyncrlhf.planner.ranking import Subject, estimate
from asyncrlhf.planner.shapes import ModelShape, Workload
from asyncrlhf.planner.tables import Fitted

SOURCES = dict.fromkeys(("decode", "train", "submit", "collect", "load"), "fitted")


def test_the_file_of_a_plan_trains_and_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Costs of the local runtime's own clock: the run does what the plan said, and the files say what it was."""
    Fitted((0.05, 0.0, 0.0), (0.5, 0.0), sources=SOURCES).save(tmp_path / "profile.json", {})
    out = tmp_path / "plans" / "mine"
    words = ["steps=16", "batch_size=16", "num_generations=4", "runtime=local", "generator.slots=16"]
    clock = ["generator.virtual_step_seconds=0.05", "learner.virtual_step_seconds=0.5", "task.heldout_size=8"]
    given = ["--profile", f"{tmp_path}/profile.json", "--cores", "2", "--mean-length", "4", "--simulate", "2"]
    keep = ["--keep", "slots=16", "--keep", "quality=max_staleness=2", "--keep", "placement=auto"]
    assert main(["plan", *given, *keep, "--out", str(out), "weights.publish_every=1", *words, *clock]) == 0
    said = capsys.readouterr().out
    assert "predicts staleness, not reward" in said
    plan = json.loads(out.with_suffix(".json").read_text())
    layout = plan["layout"]
    assert (layout["replicas"], layout["ranks"], layout["slots"]) == (1, 1, 16) and layout["max_staleness"] == 2
    page = out.with_suffix(".html").read_text()
    assert "Seconds per step against staleness" in page and "generating" in page

    config = load_config([f"--config-dir={tmp_path}/plans", "experiment=mine", "logging.wandb=disabled"])
    assert config.async_.bound == layout["max_staleness"] and config.batch_size == 16
    assert "seed" not in yaml.safe_load((tmp_path / "plans" / "experiment" / "mine.yaml").read_text())
    quiet = ["logging.progress=none", "logging.report=false", "logging.wandb=disabled", f"run_dir={tmp_path}/run"]
    train(load_config([f"--config-dir={tmp_path}/plans", "experiment=mine", *quiet]))
    assert main(["plan", "--compare", f"{out}.json", f"{tmp_path}/run"]) == 0
    said = capsys.readouterr().out
    assert "step_seconds" in said and "within 10% of the plan" in said


@pytest.mark.parametrize(("bound", "training"), [(0, 0.5), pytest.param(2, 0.05, marks=pytest.mark.thorough)])
def test_the_closed_forms_agree_with_the_controller(tmp_path: Path, bound: int, training: float) -> None:
    """A step in which generation, its longest response, training and publishing follow one another; and one that the
    generators' speed decides."""
    costs = Fitted((0.01, 0.001, 0.0), (training, 0.0), snapshot=0.1, transfer=0.3, load=0.2)
    work = Workload(8.0, 40.0, 0.8, 400)
    layout = Layout("auto", slots=16, batch_size=16, max_staleness=bound)
    subject = Subject(
        ModelShape(1, 8, 8, 8, 1, 1, 8), work, 4, clusters_of(Namespace(gpus=None, cores=2)), layout, costs
    )
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
