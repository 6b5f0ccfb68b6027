"""An engine's base weights, kept beside it, so that an adapter alone has to travel."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from asyncrlhf.data.adapter import is_adapter, merged
from asyncrlhf.data.config import LoraConfig


class AdapterMerge:
    """Makes each version's whole weights out of the checkpoint's and the adapter that the learner sent.

    The base stays in the host's memory, once, in the engine's dtype: a version is computed from it and not from the
    version before, whose rounding would add up. Weights that are no adapter pass unchanged.
    """

    def __init__(self, config: LoraConfig, base: Mapping[str, torch.Tensor]) -> None:
        self._scaling = config.scaling
        self._base = {name: tensor.detach().to("cpu", copy=True) for name, tensor in base.items()}

    def __call__(self, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Raises WeightSyncError when the adapter does not fit the base."""
        return merged(self._base, weights, self._scaling) if is_adapter(weights) else weights
