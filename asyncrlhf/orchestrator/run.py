"""One run from its config: preflight checks, the parts' specs, the controller, and what is left behind."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging as transformers_logging

from asyncrlhf.cluster.clock import run_virtual
from asyncrlhf.cluster.nodes import shortage, this_machine
from asyncrlhf.cluster.parts import build_runtime, placement_plan, service_notes
from asyncrlhf.config.run_config import RunConfig, to_plain
from asyncrlhf.data.checkpoint_folder import context_length, load_tokenizer
from asyncrlhf.data.pretrained import check_model
from asyncrlhf.engines.generator_config import VLLM_MAX_TOP_K, GeneratorConfig, replica_kinds
from asyncrlhf.errors import ConfigError, DiskFullError, full_disk
from asyncrlhf.learner.optimizers import check_optimizer
from asyncrlhf.learner.user_loss import load_loss
from asyncrlhf.orchestrator.bookkeeping import HeldOut
from asyncrlhf.orchestrator.controller import Controller, Outcome, failure_sentence
from asyncrlhf.orchestrator.interruption import in_order, like_ctrl_c
from asyncrlhf.readahead.outlook import fusion_in_force
from asyncrlhf.records.callbacks import Callbacks
from asyncrlhf.records.checkpoint import Saved, find_checkpoint, read_checkpoint
from asyncrlhf.records.progress import RunView
from asyncrlhf.records.recorder import RunRecorder
from asyncrlhf.records.sinks import Sinks, check_sinks
from asyncrlhf.records.summary import build_summary
from asyncrlhf.redaction import redact, redacted
from asyncrlhf.rewards.build_scorer import check_rewards
from asyncrlhf.tasks.build_task import build_task
from asyncrlhf.tasks.task import Task
from asyncrlhf.types import SamplingParams
from asyncrlhf.validation import check

RUNS = Path("runs")
ERROR_FILE = "error.txt"
# Of vLLM's SamplingParams, those that leave every token a chance.
WEIGHABLE = ("frequency_penalty", "presence_penalty")


@dataclass(frozen=True)
class Prepared:
    """What preflight found in order, before any actor starts. ``config`` is what is run; where that is less than what
    was asked for, ``notes`` say so."""

    config: RunConfig
    run_dir: Path
    tokenizer: transformers.PreTrainedTokenizerBase
    task: Task
    sampling: SamplingParams
    saved: Saved | None
    notes: Sequence[str] = ()


def prepare(config: RunConfig) -> Prepared:
    """Everything that can be wrong with the input is found here; raises ConfigError with one sentence."""
    transformers_logging.disable_progress_bar()
    check_sinks(config.logging)
    _check_devices(config)
    check_model(config.model)
    tokenizer = load_tokenizer(config.model)
    completion = config.generator.max_completion_length
    task = _fitting_task(config, tokenizer)
    first = (task.heldout() or [task.train_source(config.seed).next()])[0]
    check_rewards(config.reward, tokenizer, lambda: task, completion, first)
    check_optimizer(config.learner)
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
        min_p=config.generator.min_p,
        repetition_penalty=config.generator.repetition_penalty,
        stop=tuple(config.generator.stop),
        stop_token_ids=() if config.generator.ignore_eos else (tokenizer.eos_token_id,),
    )
    saved = read_checkpoint(found) if found is not None else None
    config, notes = fusion_in_force(config, tokenizer)
    return Prepared(config, run_dir, tokenizer, task, sampling, saved, [*notes, *service_notes(config)])


def _fitting_task(config: RunConfig, tokenizer: transformers.PreTrainedTokenizerBase) -> Task:
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
    plan = placement_plan(config)
    if plan.total("GPU") == 0 or (config.runtime == "ray" and config.ray.cluster):
        return
    found = torch.cuda.device_count()
    services = {"reward": config.reward.gpus, "reference": config.reference.gpus, "critic": config.critic.gpus}
    asked = "".join(f"{name}.gpus={gpus:g}, " for name, gpus in services.items() if gpus)
    asked += f"generator.gpus={config.generator.gpus:g} and learner.gpus={config.learner.gpus:g}"
    if config.runtime == "local":
        # All parts are in one process, where they share the first GPU.
        check(found, f"{asked} need a GPU for runtime=local; torch sees 0 on this machine.")
        return
    lacking = shortage(plan, [this_machine(plan, found)])
    if lacking is not None:
        raise ConfigError(
            f"{lacking.rstrip('.')} ({asked}; torch sees {found} on this machine), and ray.address names no cluster."
            f"{_flatten_hint(config, found)}"
        )


def _flatten_hint(config: RunConfig, gpus: int) -> str:
    """What to do with too few GPUs, where taking turns on them is enough."""
    try:
        plan = placement_plan(replace(config, cluster=replace(config.cluster, placement="flatten")))
    except ConfigError:
        return ""
    fits = shortage(plan, [this_machine(plan, gpus)]) is None
    return " With cluster.placement=flatten generators and learner would take turns on them." if fits else ""


def check_truncation(generator: GeneratorConfig) -> None:
    """Training needs the set that was kept at each token, whatever the algorithm: a gradient of E[R] needs
    E[grad log pi] = 0, and every step's metrics compare with the sampler. Other stages only sample."""
    told = generator.top_p == 1 and generator.min_p == 0 and generator.top_k <= VLLM_MAX_TOP_K
    check(
        told or all(kind.config.engine != "vllm" for kind in replica_kinds(generator)),
        f"generator.top_p={generator.top_p:g} generator.top_k={generator.top_k} generator.min_p={generator.min_p:g} "
        "leave out tokens that generator.engine=vllm does not name, so that the learner could not renormalise its "
        f"policy on those that were kept; allowed: top_p=1 min_p=0 top_k<={VLLM_MAX_TOP_K}, or generator.engine=hf.",
    )


def check_penalties(config: RunConfig) -> None:
    """A penalty makes the sampler another policy than the model's. Its log-probs are recorded as they were, so that
    training is right where the loss weighs pi / mu, and wrong where it takes the samples for the policy's own."""
    generator, algorithm = config.generator, config.algorithm
    asked = {"repetition_penalty": generator.repetition_penalty} if generator.repetition_penalty != 1 else {}
    more = generator.generation_kwargs or {}
    given = {**asked, **{f"generation_kwargs.{name}": value for name, value in more.items()}}
    said = ", ".join(f"generator.{name}={value}" for name, value in given.items())
    strange = [name for name in more if name not in WEIGHABLE]
    check(
        not strange,
        f"generator.generation_kwargs.{strange and strange[0]} may leave tokens without a chance that the learner does "
        f"not hear of; allowed in training: {', '.join(WEIGHABLE)}.",
    )
    check(
        not given or algorithm.correction != "none" or algorithm.anchor == "mu",
        f"{said} samples from another distribution than the policy's, and algorithm={algorithm.name} does not "
        "weigh the difference; allowed: no penalty, or algorithm.correction, or algorithm.anchor=mu.",
    )


def new_run_dir(name: str) -> Path:
    """``runs/<name>/<time>``, with a number behind when two runs start in one second."""
    stem = RUNS / name / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    folder, number = stem, 1
    while folder.exists():
        number += 1
        folder = stem.with_name(f"{stem.name}-{number}")
    return folder


def train(config: RunConfig, callbacks: Callbacks | None = None) -> dict[str, Any]:
    """Run to the end; returns the summary. Raises ConfigError before anything starts, KeyboardInterrupt where a signal
    ended it at once or before it trained, or what made the run fail, in which case the summary on disk has the cause
    and ``error.txt`` beside it the trace."""
    with like_ctrl_c():
        return _train(config, callbacks or Callbacks())


def _train(config: RunConfig, callbacks: Callbacks) -> dict[str, Any]:
    check_truncation(config.generator)
    check_penalties(config)
    prepared = prepare(config)
    plain = to_plain(config)
    marker = prepared.saved.marker if prepared.saved is not None else None
    recorder = RunRecorder(prepared.run_dir, plain, config.logging, marker)
    (prepared.run_dir / ERROR_FILE).unlink(missing_ok=True)  # of the attempt before
    start = prepared.saved.step if prepared.saved is not None else 0
    sinks = Sinks(prepared.run_dir, plain, config.logging, start_step=start)
    view = RunView(sinks, config.steps, config.logging.progress, start, callbacks)
    view.message(f"Run directory: {prepared.run_dir}")
    for note in prepared.notes:
        view.message(note)
    for note in prepared.task.notes:
        view.message(note)
    job = _Job(prepared, recorder, view)
    runner: Callable[[Coroutine[Any, Any, Outcome]], Outcome]
    runner = run_virtual if config.runtime == "local" else asyncio.run
    cause: BaseException | None = None
    try:
        outcome = runner(job.main())
        summary = job.summary(outcome.reason, outcome)
    except (KeyboardInterrupt, asyncio.CancelledError) as error:
        cause = error
        summary = job.summary("interrupted", None)
        raise KeyboardInterrupt from error
    except BaseException as error:
        cause = error
        if full := full_disk(error, prepared.run_dir):
            summary = job.summary(f"failed: {full}", None)
            raise DiskFullError(full) from error
        summary = job.summary(f"failed: {failure_sentence(error)}", None)
        raise
    finally:
        ends = (
            view.stop,
            partial(recorder.finish, summary),
            partial(_finish_sinks, sinks, recorder, summary),
            partial(callbacks.call, "on_end", summary),
        )
        _end_all(ends, cause, prepared.run_dir)
    return summary


def _finish_sinks(sinks: Sinks, recorder: RunRecorder, summary: dict[str, Any]) -> None:
    """What the sinks have to say of their end belongs to the summary."""
    if said := sinks.finish(summary):
        summary["sinks"] = redacted(said)
        recorder.finish(summary)


def _end_all(ends: Sequence[Callable[[], None]], cause: BaseException | None, run_dir: Path) -> None:
    """Close everything, whatever of it fails. A failure here is raised only where the run had none: the first cause is
    the one that counts."""
    failures: list[BaseException] = []
    for end in ends:
        try:
            end()
        except Exception as error:
            failures.append(error)
    traces = [error for error in (cause, *failures) if error is not None and not isinstance(error, KeyboardInterrupt)]
    if traces:
        with suppress(OSError):
            text = "\n".join("".join(traceback.format_exception(error)) for error in traces)
            (run_dir / ERROR_FILE).write_text(redact(text), encoding="utf-8", errors="backslashreplace")
            traces[0].trace_file = run_dir / ERROR_FILE  # type: ignore[attr-defined]
    if failures and cause is None:
        raise failures[0]


class _Job:
    """The asynchronous part of a run."""

    def __init__(self, prepared: Prepared, recorder: RunRecorder, view: RunView) -> None:
        self._prepared = prepared
        self._recorder = recorder
        self._view = view
        self._controller: Controller | None = None
        self._taking_turns: Collection[str] = ()

    async def main(self) -> Outcome:
        prepared, config = self._prepared, self._prepared.config
        runtime = build_runtime(config, prepared.run_dir)
        runtime.tell = self._view.phase
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
        try:
            with in_order(controller.stop, self._view.message):
                return await controller.run()
        finally:
            self._taking_turns = runtime.sharing
            await controller.close()
            await runtime.close()

    def summary(self, reason: str, outcome: Outcome | None) -> dict[str, Any]:
        config = self._prepared.config
        counts = self._controller.state.ledger.counts() if self._controller is not None else {"admitted_total": 0}
        summary = build_summary(
            self._prepared.run_dir,
            ledger=counts,
            seed=config.seed,
            steps_planned=config.steps,
            staleness_bound=config.async_.bound,
            exit_reason=reason,
            heldout_before=outcome.heldout_before if outcome is not None else None,
            heldout_after=outcome.heldout_after if outcome is not None else None,
            heldout_prompts=len(self._prepared.task.heldout()),
        )
        return redacted({**summary, "taking_turns": sorted(self._taking_turns)})  # type: ignore[no-any-return]
