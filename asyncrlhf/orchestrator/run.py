"""One run from its config: preflight checks, the parts' specs, the controller, and what is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from asyncrlhf.actors.generator import GeneratorSpec
from asyncrlhf.actors.learner import LearnerSpec
from asyncrlhf.actors.reward import RewardSpec
from asyncrlhf.data.pretrained import check_model, context_length, load_tokenizer
from asyncrlhf.errors import ConfigError
from asyncrlhf.learner.user_loss import load_loss
from asyncrlhf.orchestrator.checkpoint import Saved, find_checkpoint, read_checkpoint
from asyncrlhf.orchestrator.clock import run_virtual
from asyncrlhf.orchestrator.config import RunConfig, to_plain
from asyncrlhf.orchestrator.controller import Controller, Outcome, failure_sentence
from asyncrlhf.orchestrator.evaluation import HeldOut
from asyncrlhf.orchestrator.handles import Runtime
from asyncrlhf.orchestrator.progress import Progress
from asyncrlhf.orchestrator.records import RunRecorder
from asyncrlhf.orchestrator.summary import build_summary
from asyncrlhf.orchestrator.view import RunView
from asyncrlhf.orchestrator.wandb_sink import WandbSink
from asyncrlhf.rewards.scorer import build_scorer, preflight
from asyncrlhf.tasks.base import Task
from asyncrlhf.tasks.build import build_task
from asyncrlhf.types import SamplingParams

RUNS = Path("runs")


@dataclass(frozen=True)
class Prepared:
    """What preflight found in order, before any actor starts."""

    config: RunConfig
    run_dir: Path
    tokenizer: PreTrainedTokenizerBase
    task: Task
    sampling: SamplingParams
    saved: Saved | None


def prepare(config: RunConfig) -> Prepared:
    """Everything that can be wrong with the input is found here; raises ConfigError with one sentence."""
    transformers_logging.disable_progress_bar()
    _check_devices(config)
    check_model(config.model)
    tokenizer = load_tokenizer(config.model)
    completion = config.generator.max_completion_length
    task = _fitting_task(config, tokenizer)
    scorer = build_scorer(config.reward, task, completion)
    preflight(scorer, (task.heldout() or [task.train_source(config.seed).next()])[0])
    if config.algorithm.loss.target:
        load_loss(config.algorithm.loss.target)
    given = Path(config.run_dir) if config.run_dir else None
    found = find_checkpoint(config.checkpoint.resume, given, RUNS / config.name)
    run_dir = found.parent.parent if found is not None and given is None else given or new_run_dir(config.name)
    sampling = SamplingParams(
        max_completion_length=completion,
        temperature=config.generator.temperature,
        top_p=config.generator.top_p,
        top_k=config.generator.top_k,
        stop_token_ids=() if config.generator.ignore_eos else (tokenizer.eos_token_id,),
    )
    return Prepared(config, run_dir, tokenizer, task, sampling, read_checkpoint(found) if found is not None else None)


def _fitting_task(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> Task:
    """The task, all of whose prompts leave room for a response in the model's context."""
    completion, context = config.generator.max_completion_length, context_length(config.model)
    room = context - completion
    if config.task.max_prompt_length <= room:
        return build_task(config.task, tokenizer)
    try:
        if room < 1:
            raise ConfigError("There is no room for a prompt.")
        return build_task(replace(config.task, max_prompt_length=room), tokenizer)
    except ConfigError as error:
        build_task(config.task, tokenizer)  # raises what is wrong whatever the context is
        raise ConfigError(
            f"generator.max_completion_length={completion} leaves room for prompts of {max(room, 0)} tokens in the "
            f"{context} tokens of context that model.path={config.model.path} has: {error}"
        ) from error


def _check_devices(config: RunConfig) -> None:
    """Ray would wait for ever for a GPU that this machine does not have; a cluster's are its own business."""
    wanted = config.generator.gpus * config.generator.replicas + config.learner.gpus * config.learner.ranks
    if wanted == 0 or (config.runtime == "ray" and (config.ray.address or os.environ.get("RAY_ADDRESS"))):
        return
    found = torch.cuda.device_count()
    # The local runtime keeps all of its parts in one process, where they share the first GPU.
    if found == 0 or (config.runtime == "ray" and wanted > found):
        raise ConfigError(
            f"generator.gpus={config.generator.gpus:g} and learner.gpus={config.learner.gpus:g} need {wanted:g} GPUs "
            f"in all; torch sees {found} on this machine, and ray.address names no cluster."
        )


def new_run_dir(name: str) -> Path:
    """``runs/<name>/<time>``, with a number behind when two runs start in one second."""
    stem = RUNS / name / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    folder, number = stem, 1
    while folder.exists():
        number += 1
        folder = stem.with_name(f"{stem.name}-{number}")
    return folder


def build_runtime(config: RunConfig) -> Runtime:
    """The parts' specs, hosted as ``runtime`` says."""
    generators = [
        GeneratorSpec(f"generator-{i}", config.generator, config.model, config.runtime, config.weights)
        for i in range(config.generator.replicas)
    ]
    learner = LearnerSpec(
        learner=config.learner,
        algorithm=config.algorithm,
        model=config.model,
        runtime=config.runtime,
        weights=config.weights,
        temperature=config.generator.temperature,
        max_completion_length=config.generator.max_completion_length,
        steps=config.steps,
        seed=config.seed,
    )
    reward = RewardSpec(config.reward, config.task, config.model, config.generator.max_completion_length)
    if config.runtime == "local":
        from asyncrlhf.orchestrator.local_runtime import LocalRuntime

        return LocalRuntime(generators, learner, reward)
    from asyncrlhf.orchestrator.ray_runtime import RayRuntime

    return RayRuntime(config.ray, generators, learner, reward)


def train(config: RunConfig) -> dict[str, Any]:
    """Run to the end; returns the summary. Raises ConfigError before anything starts, or what made the run fail,
    in which case the summary on disk has the cause."""
    prepared = prepare(config)
    plain = to_plain(config)
    marker = prepared.saved.marker if prepared.saved is not None else None
    try:
        recorder = RunRecorder(prepared.run_dir, plain, config.logging, marker)
    except OSError as error:
        raise ConfigError(f"run_dir={prepared.run_dir} cannot be written: {error}.") from error
    wandb = WandbSink(prepared.run_dir, plain, config.logging)
    start = prepared.saved.step if prepared.saved is not None else 0
    progress = Progress(config.steps, config.logging.progress, start_step=start)
    view = RunView(progress, wandb)
    view.message(f"Run directory: {prepared.run_dir}")
    job = _Job(prepared, recorder, view)
    runner = run_virtual if config.runtime == "local" else asyncio.run
    summary: dict[str, Any] = {}
    try:
        outcome = _run(runner, job)
        summary = job.summary(outcome.reason, outcome)
    except (KeyboardInterrupt, asyncio.CancelledError):
        summary = job.summary("interrupted", None)
        raise
    except BaseException as error:
        summary = job.summary(f"failed: {failure_sentence(error)}", None)
        raise
    finally:
        view.stop()
        recorder.finish(summary)
        wandb.finish(summary, 0 if summary.get("exit_reason") == "done" else 1)
    return summary


def _run(runner: Any, job: _Job) -> Outcome:
    outcome: Outcome = runner(job.main())
    return outcome


class _Job:
    """The asynchronous part of a run."""

    def __init__(self, prepared: Prepared, recorder: RunRecorder, view: RunView) -> None:
        self._prepared = prepared
        self._recorder = recorder
        self._view = view
        self._controller: Controller | None = None

    async def main(self) -> Outcome:
        prepared, config = self._prepared, self._prepared.config
        runtime = build_runtime(config)
        heldout = HeldOut(prepared.task.heldout(), prepared.sampling, runtime)
        source = prepared.task.train_source(config.seed)
        controller = self._controller = Controller(
            config,
            runtime,
            source,
            prepared.sampling,
            heldout,
            self._recorder,
            self._view,
            vocab_size=len(prepared.tokenizer),
            saved=prepared.saved,
        )
        restore = _on_interrupt(controller, self._view) if config.runtime == "ray" else None
        try:
            return await controller.run()
        finally:
            if restore is not None:
                restore()
            await controller.close()
            await runtime.close()

    def summary(self, reason: str, outcome: Outcome | None) -> dict[str, Any]:
        config = self._prepared.config
        counts = self._controller.state.ledger.counts() if self._controller is not None else {"admitted_total": 0}
        return build_summary(
            self._prepared.run_dir,
            ledger=counts,
            seed=config.seed,
            steps_planned=config.steps,
            staleness_bound=config.async_.bound,
            exit_reason=reason,
            heldout_before=outcome.heldout_before if outcome is not None else None,
            heldout_after=outcome.heldout_after if outcome is not None else None,
        )


def _on_interrupt(controller: Controller, view: RunView) -> Any:
    """The first Ctrl-C ends the run in order; a second one ends it at once."""
    loop = asyncio.get_running_loop()

    def first() -> None:
        view.message("Finishing the step under way and writing a checkpoint; Ctrl-C again ends at once.")
        controller.stop()
        loop.remove_signal_handler(signal.SIGINT)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, first)
    return lambda: [loop.remove_signal_handler(n) for n in (signal.SIGINT, signal.SIGTERM)]
