"""Which kernels a device spends its time in, by torch's profiler."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

LONGEST = 10
NAME_LENGTH = 120  # names of kernels are templates of several hundred characters
# By the first pattern found in the name: of kernels, and of torch's operators, which stand for them on a CPU. Attention
# comes first, since its kernels are built of the matmul libraries' parts. All else (reductions, softmax, copies
# between host and device, indexing) is "other".
KINDS = {
    "attention": r"flash|fmha|sdpa|attention",
    "matmul": r"gemm|gemv|nvjet|cutlass|cublas|splitk|xmma|^aten::(addmm|baddbmm|bmm|mm)$",
    "elementwise": r"elementwise|multi_tensor_apply|triton_poi|"
    r"^aten::(_(foreach|fused)_\w+|add|addcdiv|addcmul|copy|div|exp|fill|lerp|mul|neg|rsqrt|sigmoid|silu|silu_backward|sqrt|sub)_?$",
}


def kind_of(name: str) -> str:
    """The kind of a kernel with this name."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "other")


def table(action: Callable[[], object], device: str) -> dict[str, Any]:
    """``seconds`` of all kernels of one ``action``; the ``longest``, each with its share of them and its kind; and the
    share of each kind. On a CPU operators take the place of kernels. Empty where the profiler sees no kernel."""
    cuda = device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    # There is one cycle, which ``acc_events`` does not change; without it torch 2.11 warns of events of earlier cycles.
    with profile(activities=activities, acc_events=True) as profiler:
        action()
        if cuda:
            torch.cuda.synchronize()
    wanted = DeviceType.CUDA if cuda else DeviceType.CPU
    spent: Counter[str] = Counter()  # microseconds by name
    for row in profiler.key_averages():
        if row.device_type == wanted and not row.is_user_annotation:  # an annotation repeats the time of its kernels
            spent[row.key] += row.self_device_time_total if cuda else row.self_cpu_time_total
    total = sum(spent.values())
    if not total:
        return {}
    kinds = dict.fromkeys((*KINDS, "other"), 0.0)
    for name, time in spent.items():
        kinds[kind_of(name)] += time / total
    longest = [
        {"name": name[:NAME_LENGTH], "kind": kind_of(name), "share": time / total}
        for name, time in spent.most_common(LONGEST)
    ]
    return {"seconds": total / 1e6, "kinds": kinds, "longest": longest}
