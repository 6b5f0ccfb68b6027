"""A published synchronous step out of its phases, by the real controller on the virtual clock, and what the same phases
say of an asynchronous run on the same devices: see README.md."""

from __future__ import annotations

import tempfile
from pathlib import Path

from asyncrlhf.config.compose import load_config
from asyncrlhf.planner.costs import CostModel
from asyncrlhf.planner.shapes import ModelShape, Workload, cluster_of
from asyncrlhf.planner.tables import Fitted
from asyncrlhf.records.write.recorder import read_metrics
from asyncrlhf.simulator.simulate import OVERRIDES, figures, simulate

LLAMA_2_7B = ModelShape(32, 4096, 11008, 32000, 32, 32, 128)
STEP, GENERATION, LOGPROBS, UPDATE = 365.0, 151.0, 70.0, 133.0  # seconds; 7B, 64 GPUs
TOKENS = 64  # of every simulated response: the real lengths are not known
PLAIN = ("batch_size=64", "num_generations=8", "generator.slots=64", f"generator.max_completion_length={TOKENS}")


def step(generation: float, training: float, *overrides: str) -> float:
    """Seconds a step of a run whose batches take so long in each phase; publishing as a 7B's on 64 H100."""
    model = CostModel(LLAMA_2_7B, cluster_of("H100", 64), ranks=64, layout="fsdp2", replicas=64)
    publish = {"snapshot": model.snapshot, "transfer": model.transfer, "load": model.load}
    costs = Fitted((generation / TOKENS, 0.0, 0.0), (training, 0.0), **publish)
    config = load_config(
        [*OVERRIDES, *PLAIN, *overrides, "steps=16", "logging.progress=none", "stall_timeout_seconds=1000000"]
    )
    with tempfile.TemporaryDirectory() as folder:
        simulate(config, costs, Workload(8, TOKENS, 0.0, TOKENS), Path(folder) / "run")
        return figures(read_metrics(Path(folder) / "run" / "metrics.jsonl"), config.async_.bound, 4)["step_seconds"]


if __name__ == "__main__":
    found = step(GENERATION, LOGPROBS + UPDATE, "async=sync")
    print(f"sync, 64 GPUs: {found:.1f} s from phases, {STEP:g} s published ({found / STEP - 1:+.1%})")
    for name, generation in (("generation bound by its longest response", 1), ("by throughput", 2)):
        for what, training in (("log-probs computed", LOGPROBS + UPDATE), ("the engine's log-probs taken", UPDATE)):
            # Half of the GPUs train: twice the seconds. Half generate: twice at most, or as before where tails rule.
            found = step(GENERATION * generation, 2 * training, "async=async", "async.max_staleness=4")
            print(f"async, 32 + 32 GPUs, {name}, {what}: {found:.1f} s, {STEP / found:.2f} times as fast")
