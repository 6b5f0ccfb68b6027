"""Simulated runs: the real controller on a virtual clock writes a run's records; its parts only advance the clock."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from asyncrlhf.actors.where import available_cores
from asyncrlhf.cluster.clock import run_virtual
from asyncrlhf.cluster.parts import placement_plan, specs
from asyncrlhf.config.compose import load_config
from asyncrlhf.config.conversion import to_plain
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.errors import ConfigError
from asyncrlhf.learner.settings.learner_config import PARALLEL
from asyncrlhf.models.checkpoint_folder import load_tokenizer
from asyncrlhf.models.vocabulary import end_tokens, sampled_vocabulary
from asyncrlhf.orchestrator.controller import Controller, Outcome
from asyncrlhf.orchestrator.rollouts.heldout import HeldOut
from asyncrlhf.orchestrator.run import new_run_dir
from asyncrlhf.planner.shapes import Workload
from asyncrlhf.records.show.callbacks import Callbacks
from asyncrlhf.records.show.progress import RunView
from asyncrlhf.records.show.sinks import Sinks
from asyncrlhf.records.show.summary import build_summary
from asyncrlhf.records.write.recorder import METRICS_FILE, RunRecorder, read_metrics
from asyncrlhf.simulator.cost_runtime import CostRuntime
from asyncrlhf.simulator.cost_world import Conditions, Costs, Lengths, World
from asyncrlhf.simulator.given import changed, check_run, given, settings_of_run, sharing
from asyncrlhf.tasks.build_task import build_task
from asyncrlhf.types import SamplingParams
from asyncrlhf.validation import check

# Settings of every simulated run: parts in one process, no evaluations, checkpoints or sinks.
OVERRIDES = (
    "runtime=local",
    "generator.engine=fake",
    "generator.gpus=0",
    "learner.gpus=0",
    "learner.ranks=1",
    "learner.backend=torch",
    "learner.sharding=none",
    "learner.dp_replicate_size=1",
    "learner.gradient_reduction=microbatch",
    "learner.zero_stage=0",
    "learner.zero_offload=none",
    "learner.optim=adamw",
    "learner.routing_replay=false",
    *(f"learner.{size}=1" for size in PARALLEL),
    "learner.virtual_step_seconds=0",
    "weights.transport=auto",
    "weights.disk_path=''",
    "task.heldout_size=1",
    "eval_every=0",
    "checkpoint.every=0",
    "checkpoint.at_end=false",
    "logging.wandb=disabled",
    "logging.rollout_tokens=0",
)


def simulate(
    config: RunConfig,
    costs: Costs,
    lengths: Lengths,
    run_dir: Path,
    conditions: Conditions | None = None,
    *,
    take_turns: bool = False,
) -> dict[str, Any]:
    """Run ``config`` on the virtual clock and write its records to ``run_dir``; returns the summary, whose
    ``controller_ms_per_rollout`` is the CPU time, in ms, that the real controller took on this machine.

    ``config``: with :data:`OVERRIDES`. With ``conditions.cohort`` one simulated replica represents that many, with all
    their slots (:func:`in_cohorts`). ``take_turns``: all replicas share their devices with the learner, whose ranks the
    overrides leave out. Raises ConfigError for a folder that holds a run, and the error of a loop that failed.
    """
    conditions = conditions or Conditions()
    tokenizer = load_tokenizer(config.model)
    task = build_task(config.task, tokenizer)
    world = World(costs, lengths, conditions, config.seed)
    recorder = RunRecorder(run_dir, to_plain(config), config.logging, None)
    view = RunView(Sinks(run_dir, to_plain(config), config.logging, start_step=0), config.steps, "none", 0, Callbacks())
    sampling = SamplingParams(
        max_completion_length=config.generator.max_completion_length,
        temperature=1.0,
        stop_token_ids=end_tokens(config.model, tokenizer),
    )
    began = time.process_time()
    controllers: list[Controller] = []

    async def main() -> Outcome:
        parts = specs(config, config.weights)
        sharing = {spec.name for spec in parts.generators} if take_turns else placement_plan(config).sharing
        runtime = CostRuntime(parts, sharing, world)
        heldout = HeldOut([], sampling, runtime)
        source, vocabulary = task.train_source(config.seed), sampled_vocabulary(config.model, tokenizer)
        controller = Controller(config, runtime, source, sampling, heldout, recorder, view, vocab_size=vocabulary)
        controllers.append(controller)
        try:
            return await controller.run()
        finally:
            await controller.close()
            await runtime.close()

    outcome = run_virtual(main())
    seconds = time.process_time() - began
    counts = controllers[0].state.ledger.counts()
    summary = build_summary(
        run_dir,
        ledger=counts,
        seed=config.seed,
        steps_planned=config.steps,
        staleness_bound=config.async_.bound,
        exit_reason=outcome.reason,
    )
    summary |= {"simulated": True, "controller_ms_per_rollout": 1e3 * seconds / max(1, counts["admitted_total"])}
    recorder.finish(summary)
    return summary


def in_cohorts(config: RunConfig, cohort: int) -> RunConfig:
    """Merge every ``cohort`` replicas into one with all their slots; raises ConfigError if ``cohort`` does not divide
    ``generator.replicas``."""
    given = config.generator
    if cohort == 1:
        return config
    check(
        given.groups is None and given.replicas % cohort == 0,
        f"A cohort of {cohort} replicas does not divide generator.replicas={given.replicas}; allowed: its divisors, "
        "because the replicas of a cohort are equal.",
    )
    merged = replace(given, replicas=given.replicas // cohort, slots=given.slots * cohort)
    return replace(config, generator=merged)


def settled(metrics: Sequence[dict[str, Any]], bound: int, warm_up: int = 20) -> list[dict[str, Any]]:
    """The steps to compare: without the first ``warm_up``, whose responses are the short ones, and without the last
    ``bound`` + 2, whose batches are ready. For a short run, its second half."""
    chosen = [row for row in metrics[: len(metrics) - (bound + 2)] if row["step"] > warm_up]
    return chosen or list(metrics[len(metrics) // 2 :])


def figures(metrics: Sequence[dict[str, Any]], bound: int, warm_up: int = 20) -> dict[str, float]:
    """Averages over the settled steps of a simulated or real run: seconds per step, idle fractions of learner and
    generators, mean staleness, dropped rollouts per trained one."""
    chosen = settled(metrics, bound, warm_up)
    first = next((row for row in metrics if row["step"] == chosen[0]["step"] - 1), {"wall_time": 0.0})
    step = (chosen[-1]["wall_time"] - first["wall_time"]) / len(chosen)

    # Of shares of time a long step has more.
    lasted = [row["wall_time"] - before["wall_time"] for before, row in pairwise([first, *chosen])]

    def mean(key: str, weights: Sequence[float] | None = None) -> float:
        pairs = zip(chosen, weights or [1.0] * len(chosen), strict=True)
        found = [(row[key], weight) for row, weight in pairs if row.get(key) is not None]
        return sum(value * w for value, w in found) / sum(w for _, w in found) if found else float("nan")

    trained = sum(row["sequences"] for row in chosen[1:])
    dropped = chosen[-1].get("dropped", 0) - chosen[0].get("dropped", 0)
    return {
        "step_seconds": step,
        "learner_idle": mean("learner_idle_fraction", lasted),
        "generator_idle": mean("generator_idle_fraction", lasted),
        "staleness": mean("staleness_mean"),
        "dropped_share": dropped / trained if trained else 0.0,
        "train_seconds": mean("train_seconds"),
        "weight_sync_seconds": mean("weight_sync_seconds"),
    }


def config_of_run(run: Path, overrides: Sequence[str]) -> RunConfig:
    """The run's own config, with the changes, as a simulated run."""
    return changed(settings_of_run(run, overrides), *OVERRIDES)


def simulate_given(
    run: Path | None,
    profile: Path | None,
    overrides: Sequence[str],
    *,
    law: Workload | None = None,
    cohort: int = 1,
    out: Path | None = None,
) -> tuple[dict[str, Any], dict[str, float] | None]:
    """Simulate a run with the costs of ``run`` or of ``profile``; returns the summary with its figures, and those of
    the real run if no setting was changed. ``law``: lengths in place of the recorded ones; ``out``: the new
    run's folder."""
    if run is not None:
        check_run(run)
        config = config_of_run(run, overrides)
    else:
        config = load_config([*overrides, *OVERRIDES])
    known = given(run, profile, config, law)
    if known.lengths is None:
        raise ConfigError("simulate: a profile holds no response lengths; give --mean-length TOKENS (and --cv).")
    shared = {}
    if run is not None:
        shared = sharing(changed(settings_of_run(run, overrides)), known.costs, len(available_cores()))
    stops, seconds = known.hiccups
    conditions = Conditions(
        hiccups=stops,
        hiccup_seconds=seconds,
        interference=known.interference,
        cohort=cohort,
        **shared,
    )
    folder = out or new_run_dir(f"simulated-{config.name}")
    assert known.costs is not None, "a run or a profile has costs"
    summary = simulate(in_cohorts(config, cohort), known.costs, known.lengths, folder, conditions)
    found = figures(read_metrics(folder / METRICS_FILE), config.async_.bound)
    measured = None
    if run is not None and not overrides:
        measured = figures(read_metrics(run / METRICS_FILE), config.async_.bound)
    return {**summary, "run_dir": str(folder), "figures": found}, measured
