"""Costs fitted to a run's records or measured on a machine, and their file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls


@dataclass(frozen=True)
class Fitted:
    """Linear costs in seconds; satisfies ``cluster.cost_world.Costs``.

    Args:
        decode_terms: seconds per iteration, per sequence in it, and per token of a sequence's context.
        train_terms: seconds per step and per token of its batch.
        score_terms: by kind of worker: seconds per call and per rollout in it.
        call, message: CPU seconds of the controller for one call (with the called part's) and for one rollout in it. If
            known, the seconds of decoding, scoring and loading are CPU seconds, too: parts that share cores add up.
        cold: CPU seconds that each second of waiting for a shared core adds, whose caches have other parts' data then.
        others: cores that other processes used meanwhile: Ray's, the record writer, other programs.
        sources: source of each figure: ``measured``, ``fitted`` or ``catalogue``.
    """

    decode_terms: tuple[float, float, float]
    train_terms: tuple[float, float]
    prefill_token: float = 0.0
    score_terms: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    snapshot: float = 0.0
    transfer: float = 0.0
    load: float = 0.0
    submit: float = 0.0
    collect: float = 0.0
    call: float = 0.0
    message: float = 0.0
    cold: float = 0.0
    others: float = 0.0
    sources: Mapping[str, str] = field(default_factory=dict)

    def decode(self, running: float, context: float) -> float:
        base, each, token = self.decode_terms
        return base + running * (each + token * context)

    def prefill(self, tokens: int) -> float:
        return self.prefill_token * tokens

    def train(self, lengths: Sequence[int]) -> float:
        base, token = self.train_terms
        return base + token * sum(lengths)

    def score(self, kind: str, rollouts: int, tokens: int) -> float:
        call, each = self.score_terms.get(kind, (0.0, 0.0))
        return call + each * rollouts

    def save(self, path: Path, made: Mapping[str, Any], **more: Any) -> None:
        """Write a profile. ``made``: commit, machine and command; ``more``: the measurements behind the costs."""
        path.parent.mkdir(parents=True, exist_ok=True)
        facts = {"made": dict(made), "costs": asdict(self), **more}
        path.write_text(json.dumps(facts, indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Fitted:
        """Raises ValueError with one sentence if the file is not a profile."""
        try:
            given = json.loads(path.read_text(encoding="utf-8"))
            costs: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in given["costs"].items()}
            costs["score_terms"] = {kind: tuple(terms) for kind, terms in costs["score_terms"].items()}
            return cls(**costs)
        except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{path} is not a profile written by `asyncrlhf profile`: {error}.") from error


def fit(rows: Any, seconds: Any) -> tuple[float, ...]:
    """Non-negative coefficients of the columns of ``rows`` that fit ``seconds`` by least squares."""
    found, _ = nnls(np.asarray(rows, dtype=float), np.asarray(seconds, dtype=float))
    return tuple(float(value) for value in found)
