"""LoRA adapters: added to a loaded model with PEFT, read out of it, and merged into its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from torch import nn

from asyncrlhf.data.data_config import LoraConfig
from asyncrlhf.errors import ConfigError, WeightSyncError

_DOWN, _UP = ".lora_A.default.weight", ".lora_B.default.weight"  # PEFT's suffixes of a layer; [r, in] and [out, r]
_BASE = ".base_layer."


def add_adapter(model: transformers.PreTrainedModel, config: LoraConfig) -> transformers.PreTrainedModel:
    """Freeze ``model`` and add a trainable pair of matrices to each target (Hu et al., 2106.09685), in place.

    The new policy initially equals the old one, because B starts at zero. Raises ConfigError if PEFT is not installed
    or finds nothing to adapt.
    """
    settings = peft_settings(config)
    from peft import inject_adapter_in_model

    try:
        return inject_adapter_in_model(settings, model)  # type: ignore[return-value]
    except ValueError as error:
        linear = sorted({n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear)})
        raise ConfigError(
            f"model.lora.target_modules={list(config.target_modules)} names no layer of the model; "
            f"its linear layers are {', '.join(linear)}."
        ) from error


def peft_settings(config: LoraConfig, **more: Any) -> Any:
    """``model.lora`` as PEFT's ``LoraConfig``, with ``more`` arguments of it; raises ConfigError without PEFT."""
    try:
        from peft import LoraConfig as PeftConfig
    except ImportError as error:
        raise ConfigError(
            f"model.lora.r={config.r} needs the package peft: pip install peft (its import fails here: {error})."
        ) from error
    targets = list(config.target_modules) or "all-linear"
    return PeftConfig(r=config.r, lora_alpha=config.alpha, target_modules=targets, lora_dropout=0.0, **more)


def trained_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The trained tensors, by name: those parameters of a plain model that train, or the adapter of an adapted one."""
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}


def published_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """What engines receive, by name: an adapter's tensors, or all parameters of a plain model, since some families
    have parameters that never train, and an engine expects every one."""
    trained = trained_tensors(model)
    return trained if is_adapter(trained) else {name: p.detach() for name, p in model.named_parameters()}


def is_adapter(names: Mapping[str, object]) -> bool:
    """Whether ``names`` are those of an adapter's tensors."""
    return any(name.endswith(_DOWN) for name in names)


def merged(
    base: Mapping[str, torch.Tensor], adapter: Mapping[str, torch.Tensor], scaling: float
) -> dict[str, torch.Tensor]:
    """Every tensor of ``base``, by its checkpoint name, with W + scaling B A instead of each adapted W [out, in].

    Computed in float32 on W's device and rounded to W's dtype. Raises WeightSyncError when a tensor of ``adapter``
    belongs to no pair or its pair fits no tensor of ``base``.
    """
    whole = dict(base)
    strangers = [name for name in adapter if not name.endswith((_DOWN, _UP))]
    layers = {name.removesuffix(_DOWN).removesuffix(_UP) for name in adapter if name not in strangers}
    halves = [layer for layer in layers if layer + _DOWN not in adapter or layer + _UP not in adapter]
    lost = [layer for layer in layers if f"{layer}.weight" not in base]
    if strangers or halves or lost:
        first = (strangers or sorted(halves) or sorted(lost))[0]
        raise WeightSyncError(f"The adapter does not fit the engine's model: {first} is not a pair beside a weight.")
    for layer in layers:
        name = f"{layer}.weight"
        down, up = (adapter[layer + half].to(base[name].device, torch.float32) for half in (_DOWN, _UP))
        if (up.shape[0], down.shape[1]) != tuple(base[name].shape):
            raise WeightSyncError(
                f"The adapter does not fit the engine's model: {layer} is {tuple(base[name].shape)}, "
                f"and its pair {tuple(up.shape)} times {tuple(down.shape)}."
            )
        whole[name] = torch.addmm(base[name].float(), up, down, alpha=scaling).to(base[name].dtype)
    return whole


def merged_state(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    """The state of the equivalent plain model, under its names: ``model``'s own
    if it has no adapter."""
    state = model.state_dict()
    if not is_adapter(state):
        return state
    layers: Iterator[Any] = (module for module in model.modules() if hasattr(module, "lora_A"))
    scaling = float(next(layers).scaling["default"])
    base = {name.replace(_BASE, "."): t for name, t in state.items() if not name.endswith((_DOWN, _UP))}
    adapter = {name: tensor for name, tensor in state.items() if name.endswith((_DOWN, _UP))}
    return merged(base, adapter, scaling)
