"""What each generator did in a learner step: rates, idle share, lag; for all of them together, and one by one."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrlhf.orchestrator.state import Replica, RunState
from asyncrlhf.records.summary import REPLICA_PREFIX

LISTED = 16  # replicas with figures of their own; those beyond are put together as "others"
_SUMS = ("tokens_per_second", "rollouts", "in_flight", "restarts", "held_back")


@dataclass(frozen=True)
class _Seen:
    busy: float
    tokens: int
    finished: int


class ReplicaMeters:
    """Remembers each replica's totals of the step before; a replica counts from when it came until it went."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._seen: dict[str, _Seen] = {}

    def step(self, elapsed: float) -> dict[str, float]:
        """Figures of the ``elapsed`` seconds since the last call. Single replicas appear where there are several.

        ``generator/NAME/...``: ``tokens_per_second``, ``rollouts`` (finished), ``idle_fraction``, ``lag`` (versions
        behind the learner), ``in_flight``, ``restarts``, ``latency`` (median seconds of a rollout) and ``held_back`` (1
        while it gets no work because it is late).
        """
        before, self._seen = self._seen, {}
        figures = {r.name: self._replica(r, before.get(r.name), elapsed) for r in self._state.replicas}
        count = max(1, len(figures))
        metrics = {
            "generator_idle_fraction": sum(f["idle_fraction"] for f in figures.values()) / count,
            "generated_tokens_per_second": sum(f["tokens_per_second"] for f in figures.values()),
        }
        if len(figures) < 2:
            return metrics
        metrics["generators_alive"] = sum(r.alive for r in self._state.replicas)
        metrics["generators_held_back"] = sum(f["held_back"] for f in figures.values())
        names = list(figures)
        shown = {name: figures[name] for name in names[: LISTED if count <= LISTED else LISTED - 1]}
        rest = [figures[name] for name in names if name not in shown]
        if rest:
            shown["others"] = _together(rest)
        return metrics | {
            f"{REPLICA_PREFIX}{name}/{key}": value for name, row in shown.items() for key, value in row.items()
        }

    def _replica(self, replica: Replica, before: _Seen | None, elapsed: float) -> dict[str, float]:
        finished = replica.pace.finished
        self._seen[replica.name] = _Seen(replica.busy_seconds, replica.tokens, finished)
        busy = replica.busy_seconds - (before.busy if before is not None else 0.0)
        figures = {
            "tokens_per_second": (replica.tokens - (before.tokens if before is not None else 0)) / elapsed,
            "rollouts": finished - (before.finished if before is not None else 0),
            "idle_fraction": 1.0 - min(1.0, max(0.0, busy / elapsed)),
            "in_flight": len(replica.in_flight),
            "restarts": replica.restarts,
            "held_back": float(replica.pace.held_back),
        }
        if replica.version >= 0:
            figures["lag"] = self._state.version - replica.version
        if replica.pace.latency is not None:
            figures["latency"] = replica.pace.latency
        return figures


def _together(rows: list[dict[str, float]]) -> dict[str, float]:
    """Counts and rates are added, idle shares and latencies averaged; the lag is the largest."""
    keys = dict.fromkeys(key for row in rows for key in row)
    together = {}
    for key in keys:
        found = [row[key] for row in rows if key in row]
        together[key] = max(found) if key == "lag" else sum(found) / (1 if key in _SUMS else len(found))
    return together
