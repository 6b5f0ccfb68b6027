"""What the weight benchmark makes of its rounds: ratios to the raw broadcast of the same round, and a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Round = Mapping[str, Mapping[str, float]]  # way to publish (and "raw") -> seconds by name


def summarize(rounds: Sequence[Round], total: int, receivers: int) -> dict[str, Any]:
    """Ratios of each round, because rounds on a busy machine differ more than the sides of one round. ``total``: bytes
    of one version."""
    raw = statistics.median(row["raw"]["publish"] for row in rounds)
    ways = {label: _way(rounds, label, total) for label in sorted(rounds[0]) if label != "raw"}
    return {
        "bytes": total,
        "receivers": receivers,
        "repeats": len(rounds),
        "raw_gb_per_second": total / raw / 1e9,
        "ways": ways,
        "rounds": [{label: dict(seconds) for label, seconds in row.items()} for row in rounds],
    }


def _way(rounds: Sequence[Round], label: str, total: int) -> dict[str, float]:
    ratios = sorted(row["raw"]["publish"] / row[label]["publish"] for row in rounds)
    seconds = {key: statistics.median(row[label][key] for row in rounds) for key in ("publish", "stall", "fenced")}
    return {
        "ratio_median": statistics.median(ratios),
        "ratio_min": ratios[0],
        "ratio_max": ratios[-1],
        "gb_per_second": total / seconds["publish"] / 1e9,
        "publish_seconds": seconds["publish"],
        "stall_seconds": seconds["stall"],
        "fenced_stall_seconds": seconds["fenced"],
        "fenced_stall_share": statistics.median(row[label]["fenced"] / row[label]["publish"] for row in rounds),
    }


def report(result: Mapping[str, Any]) -> None:
    """Print a table for each size."""
    print(
        "ratio: seconds of a raw gloo broadcast over seconds of a publish, snapshot to last answer; stall: the learner "
        f"stands still; fenced: the same beside a forward pass; {result['learner_threads']} learner thread(s)"
    )
    for size in result["sizes"]:
        print(
            f"\n{size['size']} parameters, {size['bytes'] / 1e6:.1f} MB to {size['receivers']} receivers, "
            f"{size['repeats']} rounds; raw broadcast {size['raw_gb_per_second']:.2f} GB/s"
        )
        print(f"{'':32}{'ratio (least, most)':>24}{'GB/s':>8}{'publish s':>11}{'stall s':>10}{'fenced s':>10}")
        for label, way in size["ways"].items():
            ratio = f"{way['ratio_median']:.2f} ({way['ratio_min']:.2f}, {way['ratio_max']:.2f})"
            print(
                f"{label:32}{ratio:>24}{way['gb_per_second']:8.2f}{way['publish_seconds']:11.4f}"
                f"{way['stall_seconds']:10.4f}{way['fenced_stall_seconds']:10.4f}"
            )
