"""What of the controller's state goes into a checkpoint, and how a run takes it up again."""

from __future__ import annotations

from typing import Any

from asyncrlhf.buffer.records import group_from_json, group_to_json
from asyncrlhf.cluster.handles import Runtime
from asyncrlhf.data.sources import PromptSource
from asyncrlhf.errors import ConfigError
from asyncrlhf.orchestrator.references import fingerprint
from asyncrlhf.orchestrator.rollout_log import RolloutLog
from asyncrlhf.orchestrator.state import GroupInProgress, RunState
from asyncrlhf.records.checkpoint import Saved
from asyncrlhf.types import Payload, RolloutGroup


def snapshot_state(state: RunState, source: PromptSource, log: RolloutLog) -> tuple[dict[str, Any], list[Payload]]:
    """The JSON document of a checkpoint, and references to the finished rollouts that belong to it."""
    groups = list(state.groups.values())
    finished = [s for g in groups for s in g.scored] + [s for g in state.buffer.groups() for s in g.rollouts]
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
    return document, [s.info.payload for s in finished]


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
            min([state.version, *(s.info.min_version for s in scored)]),
            set(unscored),
            set(unscored),
            list(scored),
        )
        for rollout_id in sorted(unscored):
            if state.ledger.get(rollout_id).state != "admitted":  # type: ignore[union-attr]
                state.ledger.requeue(rollout_id)
            state.requeue.append(rollout_id)
    state.ledger.check()
