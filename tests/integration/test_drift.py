"""Checkpoints taken up with other settings: refused before anything starts, or trained to the end with no deadlock."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from asyncrlhf.cluster.local_runtime import LocalRuntime
from asyncrlhf.config.drift import ADAPT, NOTE, REFUSE
from asyncrlhf.errors import ConfigError
from asyncrlhf.orchestrator.learning.learn import LearnLoop
from tests.integration.test_local_loop import TAIL, interrupt_after
from tests.loop import FAKE, Finished, run

# Slow generators of many slots and a fast learner: the checkpoint holds whole groups, some old, and unfinished ones.
BEGUN = (*FAKE, *TAIL, "steps=12", "async.max_staleness=6", "buffer.capacity=112", "learner.virtual_step_seconds=0.1")
DRIFTS = [  # each setting's decision: tests/unit/config/test_drift.py
    ("seed=1", REFUSE),
    ("steps=2", REFUSE),
    ("algorithm=ppo", REFUSE),
    ("steps=6", ADAPT),
    ("learner.learning_rate=1e-3", ADAPT),
    ("algorithm=grpo", ADAPT),
    ("async.max_staleness=0", ADAPT),
    ("async.max_staleness=1 buffer.capacity=16", ADAPT),
    ("async.max_staleness=1 async.over_stale=wait", ADAPT),
    ("async.max_staleness=2 async.over_stale=mask", ADAPT),
    ("buffer.capacity=16", ADAPT),
    ("async.adaptive=true", ADAPT),
    ("generator.replicas=3 generator.slots=4", ADAPT),
    ("generator.engine=hf", ADAPT),
    ("fusion.max_batch=4", NOTE),
    ("checkpoint.every=3", NOTE),
]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    done = interrupt_after(tmp_path_factory.mktemp("begun") / "run", 5, *BEGUN)
    state = json.loads(next(done.folder.glob("checkpoints/*/controller.json")).read_text())
    oldest = min(r["min_version"] for group in state["buffer"]["groups"] for r in group["rollouts"])
    assert len(state["buffer"]["groups"]) >= 8 and oldest <= 3 and state["groups"], "there is nothing to adapt"
    return done


@pytest.mark.in_turn
@pytest.mark.parametrize(("given", "decision"), DRIFTS)
@pytest.mark.more_but(every=8)
def test_a_drift_is_refused_or_the_run_goes_on_to_its_end(
    given: str, decision: str, begun: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(begun.folder, tmp_path / "run"))
    key = given.partition("=")[0].replace("algorithm", "algorithm.name" if "grpo" in given else "algorithm.advantage")
    options = (*BEGUN, *given.split(), "checkpoint.resume=auto")
    if decision == REFUSE:
        monkeypatch.setattr(LocalRuntime, "start", lambda self: pytest.fail("a part was started"))
        with pytest.raises(ConfigError, match=rf"refused: .*\b{key}="):
            run(folder, *options)
        assert not (folder / "attempts.json").read_text().count("from_step") > 1, "a refused attempt is none"
        return
    done = run(folder, *options)
    done.assert_ledger_whole()
    end = 6 if given == "steps=6" else 12
    assert done.summary["exit_reason"] == "done" and len(done.metrics) == end
    bound = dict(word.split("=") for word in given.split()).get("async.max_staleness", "6")
    if "mask" not in given:
        assert max(row["staleness_max"] for row in done.metrics[5:]) <= int(bound)
    first, second = done.summary["attempts"]
    assert (first["from_step"], second["from_step"]) == (0, 5) and first["changes"] == []
    assert [change for change in second["changes"] if change.startswith(f"{key}=")] != []
    assert json.loads((folder / "attempts.json").read_text())[0]["config"]["steps"] == 12
    if key == "learner.learning_rate":
        assert {row["learning_rate"] for row in done.metrics[5:]} == {1e-3}


@pytest.mark.in_turn
@pytest.mark.more
def test_a_run_killed_before_its_first_checkpoint_starts_anew_by_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (*FAKE, "steps=6", "checkpoint.every=4", "checkpoint.resume=auto", "logging.flush_every=8")
    whole = run(tmp_path / "whole", *options)
    folder = tmp_path / "killed"
    for step in (0, 1, 3):
        killed_at(monkeypatch, folder, step, *options)
    options = tuple(o for o in options if o != "logging.progress=none")
    again = run(folder, *options, "logging.progress=plain")
    assert "starts anew and removes the records of 2 learner steps" in " ".join(capsys.readouterr().out.split())
    again.assert_ledger_whole()
    assert again.untimed_metrics == whole.untimed_metrics
    assert again.summary["heldout_accuracy"]["before"] == whole.summary["heldout_accuracy"]["before"]
    attempts = again.summary["attempts"]
    assert [attempt["from_step"] for attempt in attempts] == [0, 0, 0, 0]
    assert [attempt["after"] for attempt in attempts] == [None, *["killed, without a summary"] * 3]


def killed_at(monkeypatch: pytest.MonkeyPatch, folder: Path, step: int, *options: str) -> None:
    """A run that is gone as by ``kill -9`` in the midst of a step: no summary, no last records."""
    original = LearnLoop._step

    async def struck(self: LearnLoop, *arguments: object) -> None:
        if self.state.version == step:
            raise Killed
        await original(self, *arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(LearnLoop, "_step", struck)
        with pytest.raises(Killed):
            run(folder, *options)
    (folder / "summary.json").unlink()
    (folder / "error.txt").unlink()


class Killed(Exception):
    pass


def test_a_finished_run_without_a_checkpoint_is_kept(tmp_path: Path) -> None:
    done = run(tmp_path, *FAKE, "steps=2")
    before = done.metrics
    with pytest.raises(ConfigError, match="holds a finished run without a checkpoint"):
        run(tmp_path, *FAKE, "steps=2", "checkpoint.resume=auto")
    assert done.metrics == before and done.summary["exit_reason"] == "done"


def test_a_checkpoint_goes_on_in_its_own_folder(begun: Finished, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"continues there, not in run_dir="):
        run(tmp_path / "elsewhere", *BEGUN, f"checkpoint.resume={begun.folder}")
    assert not (tmp_path / "elsewhere").exists()
