"""Number formats of computations, and the one that suits the devices."""

from __future__ import annotations

from functools import cache

PRECISIONS = ("none", "bfloat16", "float16")  # of passes; the optimizer's weights stay float32
AUTO = "auto"


@cache
def cpu_has_bfloat16() -> bool:
    """Whether this machine's CPU has instructions for products in bfloat16 (AVX512-BF16, AMX, Arm's BF16). Without
    them such a product takes many times as long as in float32."""
    import torch

    return any("bf16" in name and there for name, there in torch.cpu.get_capabilities().items())


def suits_bfloat16(gpus: float) -> bool:
    """Whether a part with so many GPUs is faster in bfloat16 than in float32. A part on the CPU is judged by this
    machine's."""
    return gpus > 0 or cpu_has_bfloat16()
