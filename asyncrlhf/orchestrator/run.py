"""One run from its config: preflight checks, the parts' specs, the controller, and the final summary."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from transformers.utils import logging as transformers_logging

from asyncrlhf.buffer.ledger import Ledger
from asyncrlhf.cluster.clock import run_virtual
from asyncrlhf.cluster.handles import Runtime, within
from asyncrlhf.cluster.parts import build_runtime, check_episodes, service_notes
from asyncrlhf.config.conversion import to_plain
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.config.unused import unused_settings
from asyncrlhf.data.curriculum import Curriculum
from asyncrlhf.data.sources import PromptSource
from asyncrlhf.errors import AsyncRLHFError, ConfigError, ShortageError, failure_sentence, shortage
from asyncrlhf.last_words import tell
from asyncrlhf.learner.settings.model_fits import check_dealt_out
from asyncrlhf.learner.step.user_loss import check_loss
from asyncrlhf.learner.updates.optimizers import check_optimizer
from asyncrlhf.models.checkpoint_folder import context_length, load_shape, load_tokenizer
from asyncrlhf.models.checkpoint_notes import checkpoint_notes
from asyncrlhf.models.pretrained import check_model, check_routers
from asyncrlhf.models.vocabulary import check_prompts, end_tokens, sampled_vocabulary
from asyncrlhf.orchestrator.controller import Controller, Outcome, build_state
from asyncrlhf.orchestrator.drains import Drains
from asyncrlhf.orchestrator.recording.resume import try_on
from asyncrlhf.orchestrator.rollouts.heldout import HeldOut, evaluation_sets
from asyncrlhf.orchestrator.start.interruption import STOP_FILE, by_file, in_order, like_ctrl_c
from asyncrlhf.orchestrator.start.origin import Origin, find_origin
from asyncrlhf.orchestrator.start.preflight import (
    ERROR_FILE,
    check_devices,
    check_engine_versions,
    check_penalties,
    check_places,
    check_truncation,
    gpu_notes,
    slow_formats,
)
from asyncrlhf.readahead.outlook import fusion_in_force
from asyncrlhf.records.show.callbacks import Callbacks
from asyncrlhf.records.show.progress import RunView
from asyncrlhf.records.show.sinks import Sinks, check_sinks
from asyncrlhf.records.show.summary import build_summary, ledger_totals
from asyncrlhf.records.write.attempts import attempts
from asyncrlhf.records.write.checkpoint import Saved, find_checkpoints, newest_whole, read_checkpoint, sweep_unfinished
from asyncrlhf.records.write.record_marker import check_records
from asyncrlhf.records.write.recorder import RunRecorder
from asyncrlhf.records.write.status import STATUS_FILE, StatusFile
from asyncrlhf.records.write.whole_files import write_atomically
from asyncrlhf.redaction import redact, redacted
from asyncrlhf.rewards.build_scorer import check_rewards
from asyncrlhf.tasks.build_task import build_task
from asyncrlhf.tasks.task import Task
from asyncrlhf.types import Prompt, SamplingParams

RUNS = Path("runs")
CLOSE_SECONDS = 60.0  # for records being written, beyond the stall limit


@dataclass(frozen=True)
class Prepared:
    """The result of the preflight checks, before any actor starts. ``config`` is the one that runs; ``notes`` say where
    it does less than the user asked for."""

    config: RunConfig
    run_dir: Path
    tokenizer: transformers.PreTrainedTokenizerBase
    task: Task
    sampling: SamplingParams
    saved: Saved | None
    notes: Sequence[str] = ()
    origin: Origin = field(default_factory=Origin)


def prepare(config: RunConfig) -> Prepared:
    """Check all input before any actor starts; raises ConfigError with one sentence."""
    transformers_logging.disable_progress_bar()
    check_sinks(config.logging)
    check_engine_versions(config)
    check_devices(config)
    check_model(config.model)
    check_dealt_out(load_shape(config.model), config.learner)
    if config.learner.routing_replay:
        check_routers(config.model)
    tokenizer = load_tokenizer(config.model)
    completion = config.generator.max_completion_length
    task = _fitting_task(config, tokenizer)
    prompts = task.heldout() or [task.train_source(config.seed).next()]
    check_prompts(config.model, tokenizer, prompts)
    told = check_episodes(config, prompts[0])
    check_rewards(config.reward, tokenizer, lambda: task, completion, prompts[0], episodes=config.episode.used)
    check_optimizer(config.learner)
    if config.algorithm.loss.target:
        check_loss(config.algorithm.loss.target, config.algorithm.needs_reference)
    given = Path(config.run_dir) if config.run_dir else None
    found = find_checkpoints(config.checkpoint.resume, given, RUNS / config.name)
    run_dir = found[0].parent.parent if found and given is None else given or new_run_dir(config.name)
    check_places(run_dir)
    sampling = SamplingParams(
        max_completion_length=completion,
        temperature=config.generator.temperature,
        top_p=config.generator.top_p,
        top_k=config.generator.top_k,
        min_p=config.generator.min_p,
        repetition_penalty=config.generator.repetition_penalty,
        stop=tuple(config.generator.stop),
        stop_token_ids=() if config.generator.ignore_eos else end_tokens(config.model, tokenizer),
    )
    read = partial(_read_whole, config=config, run_dir=run_dir, task=task)
    whole, passed_over = newest_whole(found, read)
    saved, origin = whole or (None, find_origin(config, run_dir, None))
    config, notes = fusion_in_force(config, tokenizer)
    notes = [*passed_over, *told, *unused_settings(config), *slow_formats(config), *notes, *service_notes(config)]
    notes += [*gpu_notes(config), *checkpoint_notes(config.model, tokenizer)]
    notes += filter(None, [origin.said])
    return Prepared(config, run_dir, tokenizer, task, sampling, saved, notes, origin)


def _prompts(config: RunConfig, task: Task) -> PromptSource:
    source = task.train_source(config.seed)
    if config.task.curriculum == "off":
        return source
    return Curriculum(source, config.task.curriculum, config.evaluation.pass_reward)


def _read_whole(folder: Path, config: RunConfig, run_dir: Path, task: Task) -> tuple[Saved, Origin]:
    """Read the checkpoint, try to restore it, and find the settings that differ. Raises CheckpointError if it is
    damaged, contradicts itself or refers to missing records; ConfigError if it does not fit the settings."""
    saved = read_checkpoint(folder)
    origin = find_origin(config, run_dir, saved)
    check_records(run_dir, saved.marker)
    try_on(saved, build_state(config), _prompts(config, task))
    return saved, origin


def _fitting_task(config: RunConfig, tokenizer: transformers.PreTrainedTokenizerBase) -> Task:
    """The task; raises ConfigError if a prompt leaves no room for a response in the model's context."""
    completion, context = config.generator.max_completion_length, context_length(config.model)
    room = context - completion
    if config.task.max_prompt_length <= room:
        return build_task(config.task, tokenizer)
    try:
        if room < 1:
            raise ConfigError("There is no room for a prompt.")
        return build_task(replace(config.task, max_prompt_length=room), tokenizer)
    except ConfigError as error:
        build_task(config.task, tokenizer)  # raises errors that do not depend on the context
        raise ConfigError(
            f"generator.max_completion_length={completion} leaves room for prompts of {max(room, 0)} tokens in the "
            f"{context} tokens of context that model.path={config.model.path} has: {error}"
        ) from error


def new_run_dir(name: str) -> Path:
    """``runs/<name>/<time>``; a number is appended if two runs start in the same second."""
    stem = RUNS / name / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    folder, number = stem, 1
    while folder.exists():
        number += 1
        folder = stem.with_name(f"{stem.name}-{number}")
    return folder


def train(config: RunConfig, callbacks: Callbacks | None = None) -> dict[str, Any]:
    """Run to the end; returns the summary. Raises ConfigError before anything starts; KeyboardInterrupt if a signal
    ended the run at once or before it trained; else the error of a failed run, whose cause is in the summary on disk
    and whose traceback is in ``error.txt``."""
    with like_ctrl_c():
        return _train(config, callbacks or Callbacks())


def _train(config: RunConfig, callbacks: Callbacks) -> dict[str, Any]:
    began = time.monotonic()
    check_truncation(config.generator)
    check_penalties(config)
    prepared = prepare(config)
    sets = evaluation_sets(config, prepared.tokenizer)
    plain = to_plain(config)
    recorder = RunRecorder(prepared.run_dir, plain, config.logging, prepared.origin.marker)
    try:
        sinks = _open_records(prepared, plain)
    except BaseException:
        recorder.close()
        raise
    view = RunView(sinks, config.steps, config.logging.progress, prepared.origin.step, callbacks, began)
    view.message(f"Run directory: {prepared.run_dir}")
    for note in prepared.notes:
        view.message(note)
    for note in prepared.task.notes:
        view.message(note)
    job = _Job(prepared, sets, recorder, view)
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
        if lacks := shortage(error, prepared.run_dir):
            summary = job.summary(f"failed: {lacks}", None)
            raise ShortageError(lacks) from error
        summary = job.summary(f"failed: {failure_sentence(error)}", None)
        raise
    finally:
        ends = (
            view.stop,
            partial(recorder.finish, summary),
            partial(_finish_sinks, sinks, recorder, summary),
            partial(callbacks.call, "on_end", summary),
        )
        _end_all(ends, cause, prepared.run_dir, job.failures)
    return summary


def _open_records(prepared: Prepared, settings: dict[str, Any]) -> Sinks:
    """Remove what an attempt before left, note this one, and start the sinks."""
    config = prepared.config
    tell(run_dir=str(prepared.run_dir.absolute()), restarts=config.restarts, steps_planned=config.steps)
    sweep_unfinished(prepared.run_dir)
    for name in (ERROR_FILE, STATUS_FILE):
        (prepared.run_dir / name).unlink(missing_ok=True)
    prepared.origin.note(prepared.run_dir, settings)
    return Sinks(prepared.run_dir, settings, prepared.config.logging, start_step=prepared.origin.step)


def _finish_sinks(sinks: Sinks, recorder: RunRecorder, summary: dict[str, Any]) -> None:
    """Finish the sinks and add their final messages to the summary."""
    if said := sinks.finish(summary):
        summary["sinks"] = redacted(said)
        recorder.finish(summary)


def _only_interrupted(error: BaseException) -> bool:
    """Whether the error is a signal's, and no other error came of it."""
    if isinstance(error, asyncio.CancelledError):
        return error.__cause__ is None
    return isinstance(error, KeyboardInterrupt)


def _end_all(
    ends: Sequence[Callable[[], None]], cause: BaseException | None, run_dir: Path, before: Sequence[Exception]
) -> None:
    """Call every function of ``ends``, even if some fail. Raises their first error only if the run had none: neither
    ``cause`` nor the errors ``before``, which come first."""
    failures: list[BaseException] = [*before]
    for end in ends:
        try:
            end()
        except Exception as error:
            failures.append(error)
    traces = [error for error in (cause, *failures) if error is not None and not _only_interrupted(error)]
    if traces:
        with suppress(OSError):
            text = redact("\n".join("".join(traceback.format_exception(error)) for error in traces))
            write_atomically(run_dir / ERROR_FILE, text.encode(errors="backslashreplace").decode())
            traces[0].trace_file = run_dir / ERROR_FILE  # type: ignore[attr-defined]
    if failures and cause is None:
        raise failures[0]


class _Job:
    """The asynchronous part of a run."""

    def __init__(
        self, prepared: Prepared, sets: Mapping[str, Sequence[Prompt]], recorder: RunRecorder, view: RunView
    ) -> None:
        self._prepared = prepared
        self._sets = sets  # for evaluation, beside the task's own held-out prompts
        self._recorder = recorder
        self._view = view
        self._controller: Controller | None = None
        self.failures: list[Exception] = []  # of parts that did not close, beside the run's own
        self._taking_turns: Collection[str] = ()

    async def main(self) -> Outcome:
        prepared, config = self._prepared, self._prepared.config
        runtime = build_runtime(config, prepared.run_dir)
        runtime.tell = self._view.phase
        own = prepared.task.heldout()
        heldout = HeldOut(own, prepared.sampling, runtime, self._sets, config.evaluation, config.seed)
        source = _prompts(config, prepared.task)
        controller = self._controller = Controller(
            config,
            runtime,
            source,
            prepared.sampling,
            heldout,
            self._recorder,
            self._view,
            vocab_size=sampled_vocabulary(config.model, prepared.tokenizer),
            saved=prepared.saved,
        )
        try:
            with StatusFile(prepared.run_dir, controller.supervisor.status):
                outcome = await self._until_told(controller, runtime)
        finally:
            self._taking_turns = runtime.sharing
            await self._close(controller.close, runtime.close)
        if self.failures:
            raise self.failures.pop(0)
        return outcome

    async def _until_told(self, controller: Controller, runtime: Runtime) -> Outcome:
        """Run to the end, or until a signal, a file or Ray says that it must end. After a notice the run is cancelled
        if its last checkpoint is not written in time."""
        config, say = self._prepared.config, self._view.message
        seconds, stall = config.checkpoint.notice_seconds, config.stall_timeout_seconds

        def stop(notice: bool) -> str:
            if not notice:
                return controller.stop(f"stall_timeout_seconds={stall:g}")
            if limit.when() is None:
                limit.reschedule(asyncio.get_running_loop().time() + seconds)
            return controller.stop(f"checkpoint.notice_seconds={seconds:g}")

        def by_name() -> None:
            say(f"The run's folder holds a file {STOP_FILE}. {stop(True)}")

        drains = Drains(controller.state, runtime, controller.supervisor.save, partial(stop, True))
        if config.runtime == "ray" and config.ray.cluster:
            controller.supervisor.more.append(drains.watch)
        try:
            async with asyncio.timeout(None) as limit:
                with in_order(stop, say), by_file(self._prepared.run_dir, by_name):
                    return await controller.run()
        except TimeoutError:
            if not limit.expired():
                raise
        state, waits = controller.state, controller.supervisor.sentences()
        newest = f"the newest one is of step {state.saved_version}" if state.saved_version else "there is no other"
        say(
            f"No checkpoint of step {state.version} could be written within checkpoint.notice_seconds={seconds:g}; "
            f"{newest}. {waits[0]}"
        )
        raise asyncio.CancelledError

    async def _close(self, *closes: Callable[[], Awaitable[None]]) -> None:
        """Close all parts, even if some fail; collect their errors, which must not hide the run's own."""
        seconds = self._prepared.config.stall_timeout_seconds + CLOSE_SECONDS
        for close in closes:
            try:
                await within(seconds, "the run's parts", "close", close())
            except asyncio.CancelledError as error:
                if (task := asyncio.current_task()) is None or task.cancelling():
                    raise
                broken = AsyncRLHFError("the run's parts broke off while they closed")  # and no signal did it
                broken.__cause__ = error
                self.failures.append(broken)
            except Exception as error:
                self.failures.append(error)

    def summary(self, reason: str, outcome: Outcome | None) -> dict[str, Any]:
        """The content of summary.json. If the run's files cannot be read for it, only what the process knows: the error
        is one of ``failures`` and does not hide the run's own."""
        self._recorder.journal.note("end", reason=reason)
        counts = self._ledger().counts()
        try:
            return redacted(self._summary(reason, outcome, counts))  # type: ignore[no-any-return]
        except Exception as error:
            self.failures.append(error)
            known = {"run_dir": str(self._prepared.run_dir), "exit_reason": reason, "seed": self._prepared.config.seed}
            return redacted({**known, "ledger": ledger_totals(counts), "records_whole": False})  # type: ignore[no-any-return]

    def _ledger(self) -> Ledger:
        """That of the run; before it has taken up its checkpoint, the checkpoint's."""
        ledger = self._controller.state.ledger if self._controller is not None else Ledger()
        if self._prepared.saved is not None and not ledger.counts()["admitted_total"]:
            ledger = Ledger()
            ledger.load_state_dict(self._prepared.saved.state["ledger"])
        return ledger

    def _summary(self, reason: str, outcome: Outcome | None, counts: dict[str, Any]) -> dict[str, Any]:
        config = self._prepared.config
        summary = build_summary(
            self._prepared.run_dir,
            ledger=counts,
            seed=config.seed,
            steps_planned=config.steps,
            staleness_bound=config.async_.bound,
            exit_reason=reason,
            evaluated=(outcome.before, outcome.after) if outcome is not None else ({}, {}),
            heldout_prompts=len(self._prepared.task.heldout()),
            heldout_measure=config.heldout_word,
        )
        start = {name: round(seconds, 3) for name, seconds in self._view.start_seconds.items()}
        return summary | {
            "taking_turns": sorted(self._taking_turns), "start_seconds": start, **attempts(self._prepared.run_dir)
        }  # fmt: skip
