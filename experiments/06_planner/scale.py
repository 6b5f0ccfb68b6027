"""10,000 GPUs on the virtual clock: 1,250 replicas of 8, 16,384 rollouts a step; what it takes of this machine.

python experiments/06_planner/scale.py [--cohort 1] [--replicas 1250] [--batch 16384] [--steps 20]
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

from asyncrlhf.config.compose import load_config
from asyncrlhf.planner.shapes import Workload
from asyncrlhf.planner.tables import Fitted
from asyncrlhf.records.write.recorder import read_metrics
from asyncrlhf.simulator.cost_world import Conditions
from asyncrlhf.simulator.simulate import OVERRIDES, figures, in_cohorts, simulate

# 8 GPUs of a 7B model at 64 sequences: 20 ms an iteration; a step of the learner takes as long as its batch's making.
COSTS = Fitted((0.012, 1.2e-4, 0.0), (1.0, 1e-6), prefill_token=2e-5, snapshot=0.1, transfer=0.5, load=0.1)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("cohort", 1), ("replicas", 1250), ("batch", 16_384), ("steps", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    config = load_config(
        [
            *OVERRIDES,
            f"steps={given.steps}",
            f"batch_size={given.batch}",
            f"generator.replicas={given.replicas}",
            "generator.slots=64",
            "generator.max_completion_length=1024",
            "async.max_staleness=4",
            "logging.progress=none",
            "logging.report=false",
        ]
    )
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        summary = simulate(
            in_cohorts(config, given.cohort),
            COSTS,
            Workload(128, 256, 0.7, 1024),
            Path(folder) / "run",
            Conditions(cohort=given.cohort),
        )
        found = figures(read_metrics(Path(folder) / "run" / "metrics.jsonl"), 4, warm_up=5)
    print(
        json.dumps(
            vars(given)
            | {
                "seconds": round(time.perf_counter() - began, 1),
                "peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
                "controller_ms_per_rollout": round(summary["controller_ms_per_rollout"], 3),
            }
            | {name: round(value, 4) for name, value in found.items()}
        )
    )


if __name__ == "__main__":
    main()
