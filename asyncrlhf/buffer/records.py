"""Held groups as JSON values for checkpoints; payloads travel apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrlhf.types import Payload, RolloutGroup, RolloutInfo, ScoredRollout


def group_to_json(group: RolloutGroup) -> dict[str, Any]:
    return {"group_id": group.group_id, "rollouts": [_scored_to_json(r) for r in group.rollouts]}


def group_from_json(value: Mapping[str, Any], payloads: Mapping[int, Payload]) -> RolloutGroup:
    """``payloads`` by rollout id."""
    return RolloutGroup(value["group_id"], tuple(_scored_from_json(row, payloads) for row in value["rollouts"]))


def _scored_to_json(rollout: ScoredRollout) -> dict[str, Any]:
    # vars() and not dataclasses.asdict(), which would copy the payload.
    info = {key: value for key, value in vars(rollout.info).items() if key != "payload"}
    return {**vars(rollout), "info": info, "reward_parts": dict(rollout.reward_parts)}


def _scored_from_json(row: Mapping[str, Any], payloads: Mapping[int, Payload]) -> ScoredRollout:
    info = RolloutInfo(**row["info"], payload=payloads[row["info"]["rollout_id"]])
    return ScoredRollout(**{**row, "info": info})
