"""``asyncrlhf bench NAME``: picks the benchmark; each alternates what it compares within one call."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from asyncrlhf.errors import ConfigError
from asyncrlhf.validation import check, did_you_mean

# The module of each, whose function ``run`` takes the arguments. Those of experiments/ need the repository.
BENCHMARKS = {
    "control_plane": "experiments.22_control_plane.bench",
    "fusion": "experiments.19_fusion.bench",
    "generation": "experiments.17_generation.bench",
    "overlap": "asyncrlhf.bench.overlap",
    "pacing": "experiments.23_pacing.bench",
    "replicas": "experiments.18_slow_replica.bench",
    "straggler": "experiments.15_stragglers.bench",
    "trl": "experiments.13_against_trl.bench",
    "weights": "experiments.14_weight_publish.bench",
}
REPOSITORY = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark that the first argument names. Raises ConfigError for an unknown name, and for an experiment's
    benchmark where the package is installed without its repository."""
    name = arguments[0] if arguments else ""
    if name not in BENCHMARKS:
        hint = did_you_mean(name, BENCHMARKS)
        raise ConfigError(f"{name or 'nothing'} is no benchmark{hint}; allowed: {', '.join(BENCHMARKS)}.")
    module = BENCHMARKS[name]
    if module.startswith("experiments."):
        file = REPOSITORY / Path(*module.split(".")).with_suffix(".py")
        check(
            file.is_file(),
            f"The benchmark {name} is part of the repository's experiments, and this installation has the package "
            "alone; allowed without the repository: "
            f"{', '.join(n for n, m in BENCHMARKS.items() if not m.startswith('experiments.'))}.",
        )
        if str(REPOSITORY) not in sys.path:  # Ray's workers get the path of the process that starts Ray
            sys.path.insert(0, str(REPOSITORY))
    importlib.import_module(module).run(arguments[1:])
    return 0
