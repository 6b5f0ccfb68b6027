"""Which settings may differ between a checkpoint and the run that resumes it: one decision per setting."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from asyncrlhf.config.conversion import to_plain
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.errors import ConfigError
from asyncrlhf.learner.settings.algorithm import CRITIC_ADVANTAGES

Decision = Literal["refuse", "adapt", "note"]
REFUSE: Decision = "refuse"  # the run's records would be wrong, or it could not continue
ADAPT: Decision = "adapt"  # the new value applies from the checkpoint on, also for its waiting rollouts
NOTE: Decision = "note"  # training does not depend on it

_MODEL = "the weights, the reference and the tokens of waiting rollouts come from it"
_SAMPLER = "waiting rollouts carry the token sets of their sampler, and the learner treats all batches equally"
_STATES = "the optimizer's states in the checkpoint have another type"
_PLACES = "the admission gate counts its places with it"
_SCHEDULE = "waiting batches are scheduled by it"
_REWARD = "rewards before and after could not be compared"
_ON = "takes effect from the checkpoint on"
_BOUND = "takes effect from the checkpoint on; async.over_stale applies to waiting rollouts that are too old"
_LAYOUT = "the checkpoint's files have its layout"
_PARTS = "each rank reads its parts of the tensors; a change between whole and sharded tensors is refused"
_SPEED = "affects only speed"
_SHOWN = "affects only what is recorded and shown"
_UNREAD = "is not read in training"
_GONE = "is no setting of this version"

# The setting, or the group of settings, with the longest name decides. docs/resume.md shows this table.
RULES: dict[str, tuple[Decision, str]] = {
    "name": (NOTE, "names the folder of new runs"),
    "run_dir": (NOTE, "is where the checkpoint lies"),
    "seed": (REFUSE, "prompts and draws follow from it"),
    "steps": (ADAPT, "is the run's new end"),
    "batch_size": (REFUSE, "waiting rollouts are counted by it"),
    "num_generations": (REFUSE, "waiting groups have this size"),
    "runtime": (REFUSE, "the two runtimes use different clocks"),
    "eval_every": (NOTE, "evaluations happen at other steps"),
    "stall_timeout_seconds": (NOTE, "is a time limit"),
    "max_failure_fraction": (NOTE, "is a limit of failures"),
    "restarts": (NOTE, "is a limit of failures"),
    "max_restarts": (NOTE, "is a limit of failures"),
    "model": (REFUSE, _MODEL),
    "model.trust_remote_code": (NOTE, "lets code run that the model needs"),
    "task": (REFUSE, "the prompts before and after would differ"),
    "algorithm": (ADAPT, _ON),
    "async": (ADAPT, _ON),
    "async.mode": (REFUSE, _SCHEDULE),
    "async.lag": (REFUSE, _SCHEDULE),
    "async.max_staleness": (ADAPT, _BOUND),
    "async.min_staleness": (ADAPT, _BOUND),
    "async.over_stale": (ADAPT, _BOUND),
    "generator": (ADAPT, _ON),
    "generator.top_p": (REFUSE, _SAMPLER),
    "generator.top_k": (REFUSE, _SAMPLER),
    "generator.min_p": (REFUSE, _SAMPLER),
    "learner": (ADAPT, _ON),
    "learner.backend": (REFUSE, _LAYOUT),
    "learner.sharding": (ADAPT, _PARTS),
    "learner.tensor_parallel_size": (ADAPT, _PARTS),
    "learner.expert_parallel_size": (ADAPT, _PARTS),
    "learner.zero_stage": (REFUSE, _LAYOUT),
    "learner.zero_offload": (REFUSE, _STATES),
    "learner.optim": (REFUSE, _STATES),
    "learner.routing_replay": (REFUSE, "waiting rollouts carry the experts of their tokens, or lack them"),
    "learner.optim_args": (REFUSE, _STATES),
    "weights": (NOTE, "affects only how weights are sent"),
    "weights.publish_every": (ADAPT, _ON),
    "weights.dtype": (ADAPT, _ON),
    "buffer": (ADAPT, _ON),
    "buffer.capacity": (ADAPT, "waiting rollouts beyond it are trained before new ones start"),
    "buffer.max_reuse": (REFUSE, _PLACES),
    "buffer.replay_fraction": (REFUSE, _PLACES),
    "reward": (REFUSE, _REWARD),
    "reward.workers": (NOTE, _SPEED),
    "reward.threads": (NOTE, _SPEED),
    "reward.gpus": (NOTE, _SPEED),
    "reward.max_batch_tokens": (NOTE, _SPEED),
    "reward.timeout_seconds": (NOTE, "is a time limit"),
    "reward.model_timeout_seconds": (NOTE, "is a time limit"),
    "reward.model.trust_remote_code": (NOTE, "lets code run that the model needs"),
    "reward.http": (NOTE, "an endpoint may move; its rewards are assumed to stay the same"),
    "fusion": (NOTE, "affects only when rewards are computed"),
    "reference": (ADAPT, "reference log-probs of waiting rollouts are recomputed if they depend on it"),
    "critic": (ADAPT, "missing values of waiting rollouts are computed"),
    "logging": (NOTE, _SHOWN),
    "checkpoint": (NOTE, "affects only when checkpoints are written"),
    "cluster": (NOTE, "affects only where parts run"),
    "ray": (NOTE, "affects only where parts run"),
    "sft": (NOTE, _UNREAD),
    "preferences": (NOTE, _UNREAD),
    "reward_model": (NOTE, _UNREAD),
    "evaluation": (NOTE, _UNREAD),
    "sweep": (NOTE, _UNREAD),
}
# They name the run to resume, so they differ at every resume.
_ADDRESS = ("run_dir", "checkpoint.resume")


@dataclass(frozen=True)
class Change:
    """One setting, or the content of the file that it names, that differs from the checkpoint's."""

    key: str
    before: Any
    now: Any
    decision: Decision
    reason: str

    def __str__(self) -> str:
        return f"{self.key}={shown(self.now)} (was {shown(self.before)}): {self.reason}"


def rule(key: str) -> tuple[Decision, str]:
    """The decision on ``key`` and its reason, by the longest part of its name that has a rule."""
    parts = key.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((RULES[name] for name in names if name in RULES), (NOTE, _GONE))


def drift(
    before: Mapping[str, Any],
    now: RunConfig,
    *,
    step: int = 0,
    held: Mapping[str, str] | None = None,
    found: Mapping[str, str] | None = None,
) -> list[Change]:
    """The differences, in the order of the settings.

    Args:
        before: the checkpoint's settings as ``to_plain`` gives them; missing ones have their default.
        step: learner steps of the checkpoint.
        held: digests of the files that settings name, at the start of the run; see ``config.inputs``.
        found: the same of today.
    """
    known, new = dict(_leaves(_json(to_plain(RunConfig())))), dict(_leaves(_json(to_plain(now))))
    old = known | dict(_leaves(_json(before)))
    held, found = held or {}, found or {}
    keys = [key for key in [*new, *(k for k in old if k not in new)] if key not in _ADDRESS]
    changes = []
    for key in keys:
        same = key in held and held[key] == found.get(key)
        if old.get(key) != new.get(key):
            decision, reason = (NOTE, "the same files in another place") if same else rule(key)
            reason = reason if any(f"{key}.".startswith(f"{name}.") for name in known) else _GONE
            refused = _cannot(key, old, new, step)
            chosen = (REFUSE, refused) if refused else (decision, reason)
            changes.append(Change(key, old.get(key), new.get(key), *chosen))
        elif key in held and key in found and not same:
            changes.append(_replaced(key, held[key], found[key]))
    return changes


def _cannot(key: str, old: Mapping[str, Any], new: Mapping[str, Any], step: int) -> str:
    """Why this particular change of a changeable setting is refused; empty if it is not."""
    was, now = old.get(key), new.get(key)
    if key == "steps" and new[key] < step:
        return f"{step} steps are done"
    if key == "algorithm.advantage" and (was in CRITIC_ADVANTAGES) != (now in CRITIC_ADVANTAGES):
        return "only one of the two has a critic, and the checkpoint was written by the first"
    if key == "algorithm.anchor" and "ema" in (was, now):
        return "only one of the two has a slow copy of the policy, and the checkpoint was written by the first"
    if key == "learner.mixed_precision" and "float16" in (was, now):
        return "only one of the two scales the loss, and the checkpoint was written by the first"
    if rule(key)[1] == _PARTS and _in_parts(old) != _in_parts(new):
        return _LAYOUT
    if key == "learner.ranks" and new["learner.backend"] == "deepspeed":
        return "DeepSpeed's files are for that many ranks"
    return ""


def _in_parts(settings: Mapping[str, Any]) -> bool:
    """Whether each rank holds, and a checkpoint lists, parts of the tensors: FSDP2, tensor and expert parallelism."""
    sizes = (settings[f"learner.{name}_parallel_size"] for name in ("tensor", "expert"))
    return settings["learner.sharding"] == "fsdp2" or any(size > 1 for size in sizes)


def _replaced(key: str, was: str, now: str) -> Change:
    """The change of a setting that kept its value but names a file with another content."""
    decision, reason = rule(key)
    if key.rpartition(".")[2] in ("target", "reward_funcs", "optim", "sinks"):
        decision, reason = NOTE, "its code has changed since the start of the run"
    return Change(f"content of {key}", was, now, decision, reason)


def told(changes: Sequence[Change], folder: object) -> str:
    """One message for the user about all changes; raises ConfigError with it if one of them is refused."""
    groups = {d: [str(c) for c in changes if c.decision == d] for d in (REFUSE, ADAPT, NOTE)}
    titles = {REFUSE: "refused", ADAPT: "adopted", NOTE: "noted"}
    said = "; ".join(f"{titles[d]}: {', '.join(found)}" for d, found in groups.items() if found)
    if groups[REFUSE]:
        raise ConfigError(
            f"The checkpoint {folder} belongs to a run with other settings ({said}); restore the refused ones, or "
            "start another run, with model.path=CHECKPOINT/learner/model to begin with these weights."
        )
    return f"Settings that differ from the checkpoint's: {said}." if said else ""


def shown(value: Any) -> str:
    """A value in a sentence: short, and without the credentials of a URL."""
    text = re.sub(r"//[^/@\s]*@", "//***@", "nothing" if value is None else str(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def _json(value: Any) -> Any:
    """The value as read from a checkpoint's document: lists instead of tuples."""
    return json.loads(json.dumps(value, default=str))


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", None if value == {} else value
