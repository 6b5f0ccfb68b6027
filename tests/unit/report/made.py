"""Runs and sweeps that were never trained, with every metric that the report draws."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from asyncrlhf.report.panels import PANELS

BATCH = 16
LAGS = ("0", "1", "3-4")


def metrics_of(seed: int, steps: int, gain: float = 0.5) -> list[dict[str, Any]]:
    """A line a step; the reward rises by ``gain`` over the run, and every fifth step is evaluated."""
    rng = np.random.default_rng(seed)
    names = sorted({name for panel in PANELS for name in panel.metrics})
    times = np.cumsum(rng.uniform(0.5, 1.5, steps))
    lines = []
    for step in range(1, steps + 1):
        line: dict[str, Any] = {"step": step, **{name: float(rng.uniform(0.1, 0.9)) for name in names}}
        reward = 0.2 + gain * step / steps + rng.normal(0, 0.02)
        line |= {"wall_time": times[step - 1], "reward_mean": reward, "sequences": BATCH, "dropped": step // 7}
        line |= {"response_tokens": float(rng.integers(40, 90)), "heldout_accuracy": reward if step % 5 == 0 else None}
        for name in ("staleness", "staleness_in_flight", "staleness_in_queue"):
            line |= {f"{name}_p10": 0.0, f"{name}_mean": float(rng.uniform(0.5, 1.5)), f"{name}_p90": 2.0}
        layers = ("embed_tokens.weight", *(f"layers.{i}" for i in range(30)))
        line |= {f"weights_changed/model.{layer}": float(rng.uniform(0.01, 0.02)) for layer in layers}
        shares = rng.dirichlet(np.ones(len(LAGS)))
        for lag, share in zip(LAGS, shares, strict=True):
            if lag == "3-4" and step < 4:
                continue  # no token is so old yet
            figures = {"ess_fraction": 0.9, "ratio_mean": 1.0, "kl": 0.02, "reward_mean": reward}
            line |= {f"lag_{lag}/{name}": value * rng.uniform(0.9, 1.1) for name, value in figures.items()}
            line[f"lag_{lag}/token_fraction"] = float(share)
        lines.append(line)
    return lines


def full_run(folder: Path, *, seed: int = 0, steps: int = 45, gain: float = 0.5, **config: Any) -> Path:
    folder.mkdir(parents=True)
    lines = metrics_of(hash_of(folder.name) + seed, steps, gain)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.yaml").write_text(yaml.safe_dump({"seed": seed, "run_dir": str(folder), **config}))
    summary = {
        "exit_reason": "done",
        "heldout_accuracy": {"before": 0.2, "after": 0.2 + gain},
        "reward": {"first": 0.2, "last": 0.2 + gain},
        "staleness": {"bound": 2},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def hash_of(name: str) -> int:
    return sum(map(ord, name)) * 100


def full_sweep(folder: Path, methods: tuple[str, ...] = ("grpo", "decoupled_grpo")) -> Path:
    """Two seeds of each method at lags 0 and 4 side by side, and of sync and async with the machine to themselves."""
    jobs = []

    def add(name: str, choices: dict[str, str], seed: int, gain: float, timing: str, **config: Any) -> None:
        config["algorithm"] = {"name": choices.get("algorithm", methods[-1])}
        full_run(folder / "jobs" / name, seed=seed, gain=gain, **config)
        jobs.append(
            {"name": name, "hash": name, "part": "", "timing": timing, "choices": choices, "seed": seed,
             "state": "done", "folder": f"jobs/{name}", "config": config}
        )  # fmt: skip

    for seed in (0, 1):
        for number, method in enumerate(methods):
            for lag in (0, 4):
                settings = {"mode": "fixed_lag", "lag": lag, "max_staleness": lag}
                choices = {"async.lag": str(lag), "algorithm": method}
                gain = 0.5 - 0.05 * lag * (1 - number / len(methods))
                add(f"{method}-{lag}-{seed}", choices, seed, gain, "shared", **{"async": settings})
        for mode in ("sync", "async"):
            settings = {"mode": mode, "max_staleness": 4}
            add(f"{mode}-{seed}", {"async": mode}, seed, 0.5, "exclusive", **{"async": settings})
    document = {"format": 1, "name": "made", "overrides": [], "git": None, "data": {}, "jobs": jobs}
    (folder / "sweep.json").write_text(json.dumps(document))
    return folder
