"""How the jobs of a sweep are called in W&B: one group, each job by what differs, unless the user said otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrlhf.cli.sweep import _to_sync
from asyncrlhf.config.compose import load_config, quoted
from asyncrlhf.config.environment_config import LoggingConfig
from asyncrlhf.sweeps.plan import plan_sweep
from asyncrlhf.sweeps.record import SweepRecord
from asyncrlhf.sweeps.run import Sweeper


def logging_of_jobs(folder: Path, *overrides: str) -> tuple[Any, list[LoggingConfig]]:
    """The plan, and what each job's run is told of logging: composed as the worker composes it."""
    plan = plan_sweep(["runtime=local", "async=fixed_lag", "async.lag=4", "algorithm=grpo,tis", *overrides])
    table: Any = None
    sweeper = Sweeper(plan, SweepRecord(folder, plan), table)
    return plan, [load_config([*job.overrides, *sweeper._grouped(job)]).logging for job in plan.jobs]


def test_jobs_are_grouped_named_and_tagged(tmp_path: Path) -> None:
    plan, found = logging_of_jobs(tmp_path, "sweep.name=lags", "seeds=1")
    assert {logging.wandb_keywords["group"] for logging in found} == {plan.folder_name}
    assert [logging.wandb_keywords["name"] for logging in found] == [job.name for job in plan.jobs]
    second = found[1].wandb_keywords
    assert (second["name"], second["job_type"]) == ("algorithm=tis,seed=0", "job")
    assert second["tags"] == ["algorithm=tis", "seed=0"]


def test_what_the_user_names_stays(tmp_path: Path) -> None:
    _, found = logging_of_jobs(tmp_path, "logging.wandb_kwargs={group:mine,tags:[paper],job_type:ablation}")
    named = [x.wandb_keywords for x in found]
    assert {(x["group"], *x["tags"], x["job_type"]) for x in named} == {("mine", "paper", "ablation")}


def test_choices_with_odd_characters_make_tags(tmp_path: Path) -> None:
    """Among them one that is longer than W&B's tags."""
    odd = ("run's own", "a,b=c\\'", "x" * 80)
    plan = plan_sweep(["runtime=local", f"task.system_prompt={','.join(map(quoted, odd))}"])
    table: Any = None
    sweeper = Sweeper(plan, SweepRecord(tmp_path, plan), table)
    for job, text in zip(plan.jobs, odd, strict=True):
        config = load_config([*job.overrides, *sweeper._grouped(job)])
        assert config.task.system_prompt == text
        assert config.logging.wandb_keywords["tags"][0] == f"task.system_prompt={text}"[:64]


def test_what_sends_a_sweep_to_wandb_is_named_where_there_is_something(tmp_path: Path) -> None:
    assert _to_sync(tmp_path) == []
    (tmp_path / "jobs" / "lag=0,seed=0" / "wandb" / "offline-run-1").mkdir(parents=True)
    (line,) = _to_sync(tmp_path)
    assert list(Path("/").glob(line.partition("wandb sync /")[2])) == [*tmp_path.glob("jobs/*/wandb/*")]
