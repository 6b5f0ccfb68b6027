"""OpenRLHF's losses, loaded by path: importing the package asks for flash-attn and a GPU."""

from __future__ import annotations

import importlib.metadata
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[np.float64]


def _by_path() -> Any:
    """`openrlhf/models/loss.py`. Its one neighbour imports deepspeed for functions that no loss calls: stood in for."""
    folder = Path(str(importlib.metadata.distribution("openrlhf").locate_file("openrlhf/models")))
    package = ModuleType("openrlhf_models")
    package.__path__ = [str(folder)]
    absent = "deepspeed" not in sys.modules
    sys.modules["openrlhf_models"] = package
    if absent:
        sys.modules["deepspeed"] = ModuleType("deepspeed")
    try:
        spec = spec_from_file_location("openrlhf_models.loss", folder / "loss.py")
        assert spec is not None and spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        if absent:
            del sys.modules["deepspeed"]
    return module


LOSSES = _by_path()


def gradient(
    theta: Array, old: Array, mask: Array, advantages: Array, sampled: Array | None = None, **settings: Any
) -> Array:
    """d loss / d theta [N, L]; ``sampled`` are the sampler's log-probs."""
    leaf = torch.from_numpy(theta).requires_grad_()
    loss = LOSSES.PolicyLoss(**settings)(
        leaf,
        torch.from_numpy(old),
        torch.from_numpy(advantages),
        torch.from_numpy(mask),
        None if sampled is None else torch.from_numpy(sampled),
    )[0]
    (found,) = torch.autograd.grad(loss, leaf)
    return found.numpy()


def value_gradient(
    values: Array, old_values: Array, returns: Array, mask: Array, clip: float, token_level_loss: bool
) -> Array:
    leaf = torch.from_numpy(values).requires_grad_()
    arrays = (torch.from_numpy(array) for array in (old_values, returns, mask))
    (found,) = torch.autograd.grad(LOSSES.ValueLoss(clip, token_level_loss)(leaf, *arrays), leaf)
    return found.numpy()


def dpo_gradient(chosen: Array, rejected: Array, beta: float, ipo: bool) -> tuple[Array, Array]:
    """d loss / d (policy's log-prob of each chosen and of each rejected), [P] each, as log-ratios to the reference."""
    leaves = [torch.from_numpy(array).requires_grad_() for array in (chosen, rejected)]
    zeros = torch.zeros(len(chosen))
    loss, _, _ = LOSSES.DPOLoss(beta, ipo=ipo)(*leaves, zeros, zeros)
    first, second = torch.autograd.grad(loss, leaves)
    return first.numpy(), second.numpy()
