"""Saves the controller's state in a checkpoint, and restores it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from asyncrlhf.actors.learner import LearnerWorker
from asyncrlhf.buffer.held import group_from_json, group_to_json
from asyncrlhf.cluster.handles import LONG_SECONDS, AnnotatorHandle, Runtime
from asyncrlhf.cluster.parts import reference_spec
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.data.sources import PromptSource
from asyncrlhf.errors import AsyncRLHFError, CheckpointError, ConfigError, LedgerError
from asyncrlhf.learner.state.checkpoint import check_fits, read_head
from asyncrlhf.orchestrator.recording.rollout_log import RolloutLog
from asyncrlhf.orchestrator.rollouts.annotate import annotate
from asyncrlhf.orchestrator.state import GroupInProgress, RunState
from asyncrlhf.records.write.checkpoint import Saved
from asyncrlhf.types import Payload, Rollout, RolloutGroup


def snapshot_state(state: RunState, source: PromptSource, log: RolloutLog) -> tuple[dict[str, Any], list[Payload]]:
    """The JSON document of a checkpoint, and references to the finished rollouts that belong to it."""
    groups = list(state.groups.values())
    finished = [r for g in groups for r in g.scored] + [r for g in state.buffer.groups() for r in g.rollouts]
    document = {
        "version": state.version,
        "published_version": state.published_version,
        "epoch": state.epoch,
        "next_group_id": state.next_group_id,
        "elapsed": state.elapsed,
        "clock": state.now(),
        "config": state.settings,
        "reference": fingerprint(state.config),
        "cursor": source.state(),
        "ledger": state.ledger.state_dict(),
        "gate": state.gate.state_dict(),
        "buffer": state.buffer.state_dict(),
        "adaptive": state.adaptive.state_dict(),
        "uses": {str(k): v for k, v in log.uses().items()},
        "groups": [
            {
                "group_id": g.group_id,
                "scheduled_step": g.scheduled_step,
                "version": g.version,
                "admitted_at": g.admitted_at,
                "unscored": sorted(g.unscored),
                "scored": group_to_json(RolloutGroup(g.group_id, tuple(g.scored))),
            }
            for g in groups
        ],
    }
    return document, [r.payload for r in finished]


def fingerprint(config: RunConfig) -> dict[str, Any] | None:
    """The model and settings that determine the reference log-probs in a checkpoint; None if it holds none."""
    spec = reference_spec(config)
    return None if spec is None else spec.fingerprint


async def completed(saved: Saved, config: RunConfig, runtime: Runtime, moved: Callable[[], None]) -> Saved:
    """The checkpoint with the arrays that this run's learner expects of its rollouts: reference log-probs, values, or
    neither.

    Log-probs are computed if they are missing or come from another model, temperature or precision. Missing values are
    computed by the checkpoint's critic: call this after the learner has loaded the checkpoint and before the first
    publish. ``moved`` is called after each answer of a worker. Raises AsyncRLHFError if a rollout's annotation fails.
    """
    rollouts = dict(saved.rollouts)
    wanted = fingerprint(config)
    if wanted is None:
        rollouts = {i: replace(r, ref_logprobs=None) for i, r in rollouts.items()}
    else:
        fits = saved.state.get("reference") == wanted
        lacking = [r for r in rollouts.values() if r.ref_logprobs is None or not fits]
        rollouts |= await _annotated(lacking, runtime.references, runtime, moved)
    if not config.critic_served:
        rollouts = {i: replace(r, values=None, critic_version=None) for i, r in rollouts.items()}
    elif lacking := [r for r in rollouts.values() if r.values is None]:
        await runtime.learner.snapshot(None)
        ticket = await runtime.learner.call(LONG_SECONDS, LearnerWorker.critic_ticket)
        rollouts |= await _annotated(lacking, runtime.critics, runtime, moved, ticket)
    return replace(saved, rollouts=rollouts)


async def _annotated(
    lacking: Sequence[Rollout],
    workers: Sequence[AnnotatorHandle],
    runtime: Runtime,
    moved: Callable[[], None],
    ticket: Any = None,
) -> dict[int, Rollout]:
    """The rollouts with the arrays that one worker computes for them, by rollout id."""
    if not lacking:
        return {}
    stored = runtime.store(lacking)
    places = []
    for payload, given in zip(stored, await annotate(workers[0], stored, moved, ticket), strict=True):
        if given.arrays is None:
            raise AsyncRLHFError(f"Rollout {given.rollout_id} of the checkpoint cannot be resumed: {given.error}")
        places.append(replace(payload, annotations=(given.arrays,)))
    return {rollout.rollout_id: rollout for rollout in await runtime.fetch(places)}


def try_on(saved: Saved, state: RunState, source: PromptSource) -> None:
    """Restore the checkpoint into a fresh ``state`` and ``source``, which are not used afterwards. Raises
    CheckpointError if its parts contradict each other, ConfigError if it does not fit the settings."""
    try:
        _take_up(state, saved, source, {rollout_id: Payload(None, 0) for rollout_id in saved.rollouts})
        {int(k): tuple(v) for k, v in saved.state["uses"].items()}
        held = {r.rollout_id for group in state.buffer.groups() for r in group.rollouts}
        held |= {r.rollout_id for group in state.groups.values() for r in group.scored}
        if held != saved.rollouts.keys():
            raise ValueError(f"{len(held)} rollouts are held, and others lie in it")
        if (version := read_head(saved.learner)["version"]) != saved.step:
            raise ValueError(f"the learner's part is of version {version!r:.80}, not {saved.step}")
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, AssertionError, LedgerError) as error:
        what = str(error) if isinstance(error, LedgerError) else f"{type(error).__name__}: {error}"
        raise CheckpointError(f"the checkpoint {saved.folder} is inconsistent ({what:.300}).") from error
    try:
        config = state.config
        check_fits(saved.learner, read_head(saved.learner), config.learner.layout, config.algorithm.saved_parts)
    except CheckpointError as error:  # the settings', and not the checkpoint's
        raise ConfigError(str(error)) from error


def restore(state: RunState, saved: Saved, source: PromptSource, log: RolloutLog, runtime: Runtime) -> None:
    """Restore a checkpoint: finished rollouts return to the buffer, and rollouts in flight are issued again. Replaces
    the state of a run whose learner died."""
    stored = runtime.store(list(saved.rollouts.values()))
    _take_up(state, saved, source, dict(zip(saved.rollouts, stored, strict=True)))
    log.restore_uses({int(k): v for k, v in saved.state["uses"].items()})


def _take_up(state: RunState, saved: Saved, source: PromptSource, payloads: Mapping[int, Payload]) -> None:
    """Restore the document's state. ``payloads`` by rollout id."""
    document = saved.state
    source.restore(document["cursor"])
    state.version = state.saved_version = state.taken_version = document["version"]
    state.epoch = max(state.epoch, document.get("epoch", 0))
    state.groups.clear()
    state.requeue.clear()
    state.next_group_id = document["next_group_id"]
    state.elapsed = document["elapsed"]
    state.ledger.load_state_dict(document["ledger"])
    state.gate.load_state_dict(document["gate"], state.version)
    state.buffer.load_state_dict(document["buffer"], payloads, state.version)
    state.adaptive.load_state_dict(document["adaptive"])
    state.journal.note("bound", bound=state.bound)
    state.follow()
    for row in document["groups"]:
        scored = group_from_json(row["scored"], payloads).rollouts
        unscored = set(row["unscored"])
        entry = state.ledger.get(min(unscored))
        assert entry is not None, f"group {row['group_id']} waits for rollouts that the ledger does not know"
        state.groups[row["group_id"]] = GroupInProgress(
            row["group_id"],
            entry.prompt,
            row["admitted_at"],
            row["scheduled_step"],
            min([state.version, *(r.min_version for r in scored)]),
            set(unscored),
            set(unscored),
            list(scored),
            state.epoch,
        )
        for rollout_id in sorted(unscored):
            if state.ledger.get(rollout_id).state != "admitted":  # type: ignore[union-attr]
                state.ledger.requeue(rollout_id)
            state.requeue.append(rollout_id)
    state.ledger.check()
