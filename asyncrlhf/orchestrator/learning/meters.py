"""The metrics of one learner step: staleness, idle fractions, rates; one line of ``metrics.jsonl`` each."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import psutil

from asyncrlhf.actors.where import available_cores
from asyncrlhf.cluster.calls import calls_made
from asyncrlhf.cluster.clock import VirtualClockLoop
from asyncrlhf.learner.settings.learner_config import StepResult
from asyncrlhf.orchestrator.replicas.weight_sync import WeightPublisher
from asyncrlhf.orchestrator.state import Replica, RunState
from asyncrlhf.records.show.summary import REPLICA_PREFIX
from asyncrlhf.transport.protocol import TransferStats
from asyncrlhf.types import RolloutGroup

LAG_SECONDS = 0.05  # between two measurements of the event loop's delay


class LoopLag:
    """How late the event loop runs due timers, the CPU time of this process, and its calls to other parts; times in
    seconds. Not measured on the virtual clock, where no timer is late and all parts share the process."""

    def __init__(self) -> None:
        self._lags: list[float] = []
        self._cpu, self._all, self._calls = time.process_time(), _cpu_of_cores(), calls_made()
        self._loop = asyncio.get_running_loop()
        if not isinstance(self._loop, VirtualClockLoop):
            self._look_again()

    def _look_again(self) -> None:
        due = self._loop.time() + LAG_SECONDS
        self._loop.call_at(due, self._look, due)

    def _look(self, due: float) -> None:
        self._lags.append(max(0.0, self._loop.time() - due))
        self._look_again()

    def step(self) -> dict[str, float]:
        """The 99th percentile, the CPU seconds and the calls since the last ``step``; empty without a measurement."""
        if isinstance(self._loop, VirtualClockLoop):
            return {}
        lags, self._lags = self._lags, []
        cpu, self._cpu = self._cpu, time.process_time()
        every, self._all = self._all, _cpu_of_cores()
        own = available_cores()  # known only after the start
        calls, self._calls = self._calls, calls_made()
        late = {"loop_lag_p99": float(np.percentile(lags, 99))} if lags else {}
        return late | {
            "controller_cpu_seconds": self._cpu - cpu,
            "shared_cpu_seconds": sum(self._all[core] - every[core] for core in own or range(len(every))),
            "remote_calls": self._calls - calls,
        }


def _weights(sent: TransferStats | None) -> dict[str, float]:
    """Of the newest transfer: its bytes, and the share of the weights that differ from the version before."""
    if sent is None:
        return {}
    shares = {f"weights_changed/{layer}": changed / max(words, 1) for layer, (changed, words) in sent.changed.items()}
    if shares:
        changed, words = (sum(column) for column in zip(*sent.changed.values(), strict=True))
        shares["weights_changed_fraction"] = changed / max(words, 1)
    return {"weights_sent_bytes": sent.bytes, **shares}


def _cpu_of_cores() -> list[float]:
    """CPU seconds of all programs on each core since the machine's start."""
    return [
        sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)
        for times in psutil.cpu_times(percpu=True)
    ]


class Meters:
    """Computes a step's logged metrics; keeps only the totals that rates need."""

    def __init__(self, state: RunState, publisher: WeightPublisher) -> None:
        self._state = state
        self._publisher = publisher
        self._last = state.now()
        self._started = self._last - state.elapsed  # a resumed run's clock goes on where the first one stopped
        self._replicas = ReplicaMeters(state)
        self._lag = LoopLag()
        readers = (
            ("", state.config.reward_reads_ahead, state.prefill),
            ("reference_", state.config.reference_reads_ahead, state.reference_prefill),
        )
        self._read_ahead = {name: (totals, replace(totals)) for name, reads, totals in readers if reads}

    def step(
        self, version: int, taken: Sequence[RolloutGroup], result: StepResult, waited: float, trained: float
    ) -> dict[str, float]:
        """Metrics of the step that moved the policy from ``version`` to ``version + 1``. ``waited``: seconds of waiting
        for a batch or for the previous publish; ``trained``: seconds of the step itself."""
        now = self._state.now()
        elapsed = max(now - self._last, 1e-9)
        samples = sum(len(t) for t in taken)
        metrics: dict[str, float] = {
            "step": version + 1,
            "policy_version": version + 1,
            "learner_deaths": self._state.epoch,
            "wall_time": now - self._started,
            **self._staleness(version, taken),
            **_episodes(version, taken),
            **_reward_parts(taken),
            **_means("logged/", [r.logged for t in taken for r in t.rollouts]),
            "staleness_bound": self._state.bound,
            "replayed_fraction": sum(len(t) for t in taken if t.replayed) / samples,
            "ref_kl": math.nan,  # null in the records, unless there is a reference policy
            **result.metrics,
            "skipped": float(result.skipped),
            "mismatch_kl": self._publisher.audits.mismatch_kl,
            "samples_per_second": samples / elapsed,
            "tokens_per_second": sum(r.response_length for t in taken for r in t.rollouts) / elapsed,
            "learner_idle_fraction": 1.0 - min(1.0, trained / elapsed),
            "weight_sync_seconds": self._publisher.last_seconds,
            "snapshot_seconds": self._publisher.snapshot_seconds,
            **_weights(self._publisher.sent),
            "train_seconds": trained,
            "wait_seconds": waited,
            **_latencies(taken),
            "reward_batch_faults": self._batch_faults(),
            **self._prefilled(),
            **self._buffer(),
            "rollouts_in_flight": sum(len(r.in_flight) for r in self._state.replicas),
            **self._lag.step(),
            **self._replicas.step(elapsed),
        }
        self._last = now
        self._state.elapsed = now - self._started
        return metrics

    def _staleness(self, version: int, taken: Sequence[RolloutGroup]) -> dict[str, float]:
        rollouts = [r for t in taken for r in t.rollouts]
        total = np.array([r.staleness(version) for r in rollouts])
        flight = np.array([r.staleness_in_flight() for r in rollouts])
        return {
            "staleness_mean": float(total.mean()),
            "staleness_max": int(total.max()),
            "staleness_in_flight_mean": float(flight.mean()),
            "staleness_in_queue_mean": float((total - flight).mean()),
            **_spread("staleness", total),
            **_spread("staleness_in_flight", flight),
            **_spread("staleness_in_queue", total - flight),
            "mixed_version_fraction": float(np.mean([r.max_version > r.min_version for r in rollouts])),
            "reward_mean": float(np.mean([r.reward for r in rollouts])),
            "response_length_mean": float(np.mean([r.response_length for r in rollouts])),
            "truncation_rate": float(np.mean([r.finish_reason == "length" for r in rollouts])),
        }

    def _buffer(self) -> dict[str, float]:
        """``buffer_size``: rollouts held; ``buffer_age``: their mean staleness at the next batch; ``dropped``: in
        total."""
        held = [r for group in self._state.buffer.groups() for r in group.rollouts]
        ages = [r.staleness(self._state.version) for r in held]
        return {
            "buffer_size": len(held),
            "buffer_age": float(np.mean(ages)) if ages else 0.0,
            "dropped": self._state.ledger.counts()["dropped"],
        }

    def _batch_faults(self) -> int:
        """Reward calls that failed as a whole since the previous step."""
        found, self._state.reward_batch_faults = self._state.reward_batch_faults, 0
        return found

    def _prefilled(self) -> dict[str, float]:
        """For the reward model and the reference, since the previous step: the fraction of scored tokens read before
        the end of their rollout, and the evictions from the cache."""
        found: dict[str, float] = {}
        for name, (now, before) in self._read_ahead.items():
            self._read_ahead[name] = (now, replace(now))
            scored = now.scored - before.scored
            found[f"{name}prefilled_fraction"] = (now.early - before.early) / scored if scored else 0.0
            found[f"{name}prefill_evictions"] = now.evicted - before.evicted
        return found


def _episodes(version: int, taken: Sequence[RolloutGroup]) -> dict[str, float]:
    """Means over the batch's episodes; empty without any. ``observed_fraction`` is a share of all response tokens."""
    rollouts = [r for t in taken for r in t.rollouts]
    facts = [r.episode for r in rollouts if r.episode is not None]
    if not facts:
        return {}
    observed = sum(r.observed_length for r in rollouts)
    forks = [f.forks for f in facts]
    return {
        "turns_mean": float(np.mean([f.turns for f in facts])),
        **({"forks_mean": float(np.mean(forks))} if any(forks) else {}),
        "observed_fraction": observed / max(1, observed + sum(r.response_length for r in rollouts)),
        "tool_seconds_mean": float(np.mean([f.tool_seconds for f in facts])),
        "tool_failures_mean": float(np.mean([f.tool_failures for f in facts])),
        "turn_staleness_first_mean": float(np.mean([version - f.first_version for f in facts])),
        "turn_staleness_last_mean": float(np.mean([version - f.last_version for f in facts])),
    }


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    """10th, 50th and 90th percentile of ``values`` [N], one per rollout."""
    low, middle, high = np.percentile(values, [10, 50, 90])
    return {f"{name}_p10": float(low), f"{name}_p50": float(middle), f"{name}_p90": float(high)}


def _latencies(taken: Sequence[RolloutGroup]) -> dict[str, float]:
    """Percentiles of the seconds from a rollout's last token to its score, and to its reference log-probs and values if
    services compute them; over the rollouts that train for the first time."""
    fresh = [r for t in taken if not t.replayed for r in t.rollouts]
    found: dict[str, float] = {}
    for name, given in (("reward", "scored_at"), ("reference", "referenced_at"), ("critic", "valued_at")):
        seconds = [at - r.generated_at for r in fresh if (at := getattr(r, given)) is not None]
        if seconds:
            p50, p95 = np.percentile(seconds, [50, 95])
            found |= {f"{name}_latency_p50": float(p50), f"{name}_latency_p95": float(p95)}
    return found


def _reward_parts(taken: Sequence[RolloutGroup]) -> dict[str, float]:
    """The mean of each part of the reward over the rollouts that it scored; empty if one part is the whole reward."""
    found = _means("reward/", [r.reward_parts for t in taken for r in t.rollouts])
    return found if found.keys() != {"reward/score"} else {}


def _means(prefix: str, rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each name over the rollouts that have it."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            values.setdefault(name, []).append(value)
    return {
        (name if name.startswith("cache_") else f"{prefix}{name}"): float(np.mean(of)) for name, of in values.items()
    }


LISTED = 16  # replicas with figures of their own; those beyond are put together as "others"
_SUMS = ("tokens_per_second", "rollouts", "in_flight", "restarts", "held_back")


class ReplicaMeters:
    """Keeps each replica's totals of the previous step; a replica counts from its start until it is removed."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._seen: dict[str, tuple[float, int, int]] = {}  # by name: busy seconds, tokens, rollouts
        self._over: dict[str, float] = {}  # by name: busy seconds that did not fit into the steps so far

    def step(self, elapsed: float) -> dict[str, float]:
        """Metrics of the ``elapsed`` seconds since the last call; with two replicas or more also one set per replica.

        ``generator/NAME/...``: ``tokens_per_second``, ``rollouts`` (finished), ``idle_fraction``, ``lag`` (versions
        behind the learner), ``in_flight``, ``restarts``, ``latency`` (median seconds of a rollout) and ``held_back`` (1
        while it gets no work because it is late).
        """
        before, self._seen = self._seen, {}
        over, self._over = self._over, {}
        figures = {
            r.name: self._replica(r, before.get(r.name), over.get(r.name, 0.0), elapsed) for r in self._state.replicas
        }
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

    def _replica(
        self, replica: Replica, before: tuple[float, int, int] | None, over: float, elapsed: float
    ) -> dict[str, float]:
        now = self._seen[replica.name] = (replica.busy_seconds, replica.tokens, replica.pace.finished)
        busy, tokens, finished = (total - old for total, old in zip(now, before or (0.0, 0, 0), strict=True))
        # A replica tells its seconds with its results, which may be those of several steps: none may be lost.
        if before is not None:
            counted = min(elapsed, max(0.0, busy + over))
            self._over[replica.name] = busy + over - counted
        else:
            counted = min(elapsed, max(0.0, busy))
        figures = {
            "tokens_per_second": tokens / elapsed,
            "rollouts": finished,
            "idle_fraction": 1.0 - counted / elapsed,
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
    """Merge several replicas' metrics: sum counts and rates, average idle fractions and latencies; largest lag."""
    keys = dict.fromkeys(key for row in rows for key in row)
    together = {}
    for key in keys:
        found = [row[key] for row in rows if key in row]
        together[key] = max(found) if key == "lag" else sum(found) / (1 if key in _SUMS else len(found))
    return together
