"""Bytes that a compiled decoder layer and the compiled log-probs move, by inductor's own count, on a CPU.

TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 python -m experiments.35_gpu_step.compiled 2048       # tokens
"""

from __future__ import annotations

import json
import sys
import time

import torch
from torch._inductor import metrics

from asyncrlhf.bench.checkpoint import SHAPES, batch, build
from asyncrlhf.learner.model.forward import PackedPolicy
from asyncrlhf.learner.model.halves import Halves
from asyncrlhf.learner.model.inputs import PackedInputs
from asyncrlhf.learner.model.model_pass import compile_layers, trunk_of


def main(tokens: int) -> None:
    """One layer of SmolLM2-135M's sizes over ``tokens`` in 8 sequences, forward and backward."""
    torch._logging.set_logs(inductor_metrics=True)  # which makes it count
    SHAPES["one layer"] = (576, 1, *SHAPES["135m"][2:])
    model = build("one layer")
    policy = PackedPolicy(model)
    Halves(model, trunk_of(model), torch.bfloat16)
    compile_layers(model)
    policy.compiled, policy.entropy_trains = True, False
    started = time.perf_counter()
    policy(PackedInputs.of_batch(batch("one layer", tokens, 8)), 1.0).logprobs.sum().backward()
    fused = [node for node, _ in metrics.nodes_num_elem if "Extern" not in type(node).__name__]
    sizes = [node.get_read_write_buffers_sizes() for node in fused]
    # The log-probs are compiled for a chunk of rows; only their graphs have numbers of the size of the vocabulary.
    chunk = 2**24 // SHAPES["one layer"][-1] * SHAPES["one layer"][-1]
    head = sum(size for size in sizes if size > 2 * chunk)
    rest = sum(sizes) - head
    print(
        json.dumps(
            {
                "seconds to compile and run": round(time.perf_counter() - started, 1),
                "layer, bytes per token": round(rest / tokens),
                "log-probs, bytes per logit": round(head / chunk, 2),
            }
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))
