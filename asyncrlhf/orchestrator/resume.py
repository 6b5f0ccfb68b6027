"""What of the controller's state goes into a checkpoint, and how a run takes it up again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from asyncrlhf.actors.learner import LearnerWorker
from asyncrlhf.buffer.held import group_from_json, group_to_json
from asyncrlhf.cluster.handles import LONG_SECONDS, AnnotatorHandle, Runtime
from asyncrlhf.cluster.parts import reference_spec
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.data.sources import PromptSource
from asyncrlhf.errors import AsyncRLHFError, ConfigError
from asyncrlhf.orchestrator.annotate import annotate
from asyncrlhf.orchestrator.rollout_log import RolloutLog
from asyncrlhf.orchestrator.state import GroupInProgress, RunState
from asyncrlhf.records.checkpoint import Saved
from asyncrlhf.types import Payload, Rollout, RolloutGroup


def snapshot_state(state: RunState, source: PromptSource, log: RolloutLog) -> tuple[dict[str, Any], list[Payload]]:
    """The JSON document of a checkpoint, and references to the finished rollouts that belong to it."""
    groups = list(state.groups.values())
    finished = [r for g in groups for r in g.scored] + [r for g in state.buffer.groups() for r in g.rollouts]
    document = {
        "version": state.version,
        "published_version": state.published_version,
        "next_group_id": state.next_group_id,
        "elapsed": state.elapsed,
        "settings": _settings(state),
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
    """What decides over the reference log-probs that a checkpoint holds; None where it holds none."""
    spec = reference_spec(config)
    return None if spec is None else spec.fingerprint


async def completed(saved: Saved, config: RunConfig, runtime: Runtime, moved: Callable[[], None]) -> Saved:
    """The checkpoint, whose rollouts have what this run's learner expects: reference log-probs, values, or neither.

    Log-probs are computed where they are missing, and anew where another model, temperature or precision gave them.
    Values that are there are kept; where they are missing, the critic of the checkpoint gives them: call it when the
    learner has loaded the checkpoint and nothing is published yet. ``moved`` is called after each of the workers'
    answers. Raises AsyncRLHFError when that fails for one.
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
    """The rollouts with what a worker computes of them, by rollout id."""
    if not lacking:
        return {}
    stored = runtime.store(lacking)
    places = []
    for payload, given in zip(stored, await annotate(workers[0], stored, moved, ticket), strict=True):
        if given.arrays is None:
            raise AsyncRLHFError(f"Rollout {given.rollout_id} of the checkpoint cannot be taken up: {given.error}")
        places.append(replace(payload, annotations=(given.arrays,)))
    return {rollout.rollout_id: rollout for rollout in await runtime.fetch(places)}


def _settings(state: RunState) -> dict[str, int]:
    """Settings that a resumed run may not change."""
    config = state.config
    return {"batch_size": config.batch_size, "num_generations": config.num_generations, "seed": config.seed}


def restore(state: RunState, saved: Saved, source: PromptSource, log: RolloutLog, runtime: Runtime) -> None:
    """Take a checkpoint up: finished rollouts return to the buffer, everything in flight is issued again."""
    document = saved.state
    for key, value in _settings(state).items():
        if document["settings"][key] != value:
            raise ConfigError(
                f"{key}={value} differs from {document['settings'][key]} in the checkpoint {saved.folder}, "
                "whose rollouts are counted by it; resume with the same value."
            )
    stored = runtime.store(list(saved.rollouts.values()))
    payloads = dict(zip(saved.rollouts, stored, strict=True))
    source.restore(document["cursor"])
    state.version = document["version"]
    state.next_group_id = document["next_group_id"]
    state.elapsed = document["elapsed"]
    state.ledger.load_state_dict(document["ledger"])
    state.gate.load_state_dict(document["gate"], state.version)
    state.buffer.load_state_dict(document["buffer"], payloads, state.version)
    state.adaptive.load_state_dict(document["adaptive"])
    state.follow()
    log.restore_uses({int(k): v for k, v in document["uses"].items()})
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
        )
        for rollout_id in sorted(unscored):
            if state.ledger.get(rollout_id).state != "admitted":  # type: ignore[union-attr]
                state.ledger.requeue(rollout_id)
            state.requeue.append(rollout_id)
    state.ledger.check()
