"""The logprob audit: whether an engine computes the same log-probs as the learner, and if not, which tensors differ."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from asyncrlhf.errors import WeightSyncError
from asyncrlhf.transport.manifest import as_bytes
from asyncrlhf.transport.weights_config import Tolerance
from asyncrlhf.types import FloatArray, IntArray


@dataclass(frozen=True)
class AuditResult:
    """Learner and engine compared over the probe's tokens, in nats. ``mismatch_kl`` is the k3 estimate of KL(engine ||
    learner) (Schulman, "Approximating KL divergence"): mean of exp(d) - 1 - d, d = learner - engine."""

    mean_abs: float
    max_abs: float
    mismatch_kl: float
    tokens: int


def probe_tokens(vocab_size: int, length: int, seed: int) -> IntArray:
    """The fixed probe text [length]: token ids drawn uniformly from the vocabulary, the same for the same arguments."""
    return np.random.default_rng(seed).integers(0, vocab_size, size=length, dtype=np.int64)


def compare(learner_logprobs: Sequence[FloatArray], engine_logprobs: Sequence[FloatArray]) -> AuditResult:
    """Compare both sides' results of ``score`` for the same texts. Raises WeightSyncError when the lengths differ."""
    lengths = [len(text) for text in learner_logprobs], [len(text) for text in engine_logprobs]
    if lengths[0] != lengths[1] or not sum(lengths[0]):
        raise WeightSyncError(f"The audit compares nothing: learner scored {lengths[0]} tokens, engine {lengths[1]}.")
    learner = np.concatenate(learner_logprobs).astype(np.float64)
    difference = learner - np.concatenate(engine_logprobs).astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):  # an engine that is far off gives inf, which no tolerance allows
        k3 = np.expm1(difference) - difference
    absolute = np.abs(difference)
    return AuditResult(float(absolute.mean()), float(absolute.max()), float(k3.mean()), len(difference))


def judge(result: AuditResult, tolerance: Tolerance, differing: Sequence[str], receiver: str, version: int) -> None:
    """Judge a suspicious result. Raises WeightSyncError if tensors differ, or if rounding does not explain the
    difference, which is also so if it is not a number."""
    if not differing and result.mean_abs <= tolerance.rounding:
        return
    names = ", ".join(differing[:5]) + (f" and {len(differing) - 5} more" if len(differing) > 5 else "")
    cause = f"tensors that differ: {names}" if differing else "all tensors arrived: the engine computes something else"
    raise WeightSyncError(
        f"the log-prob audit of {receiver} at version {version} found a mean difference of {result.mean_abs:.3g} "
        f"(largest {result.max_abs:.3g}, mismatch_kl {result.mismatch_kl:.3g}, {result.tokens} tokens), allowed "
        f"{tolerance.suspicious:g} (weights.audit_tolerance); {cause}."
    )


def tensor_digests(params: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> dict[str, str]:
    """A checksum of each tensor's dtype, shape and bytes, prefixed with the dtype; equal in every process for equal
    tensors.

    ``dtype``: the dtype of the other side's floating tensors, to which these are rounded first.
    """
    digests = {}
    for name, tensor in params.items():
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        digest = hashlib.blake2b(f"{tensor.dtype}{list(tensor.shape)}".encode(), digest_size=16)
        digest.update(as_bytes(tensor.detach().cpu()).data)
        digests[name] = f"{str(tensor.dtype).removeprefix('torch.')}:{digest.hexdigest()}"
        del tensor  # before the next one is fetched, with its bucket
    return digests


def floating_dtype(digests: Mapping[str, str]) -> str:
    """The dtype of the floating tensors in ``digests``, to which the other side's tensors are rounded."""
    kinds = (digest.partition(":")[0] for digest in digests.values())
    return next((kind for kind in kinds if kind.startswith(("float", "bfloat"))), "float32")


def differing_tensors(expected: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """The names, in ``expected``'s order, whose digests differ or that only one side has."""
    names = list(dict.fromkeys([*expected, *found]))
    return [name for name in names if expected.get(name) != found.get(name)]
