"""A LoRA adapter in vLLM: applied beside the base weights by vLLM's own layers, and replaced between two tokens."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import save
from torch import nn

from asyncrlhf.data.data_config import LoraConfig, ModelConfig
from asyncrlhf.engines.generator_config import GeneratorConfig
from asyncrlhf.models.adapter import add_adapter, peft_settings, trained_tensors
from asyncrlhf.models.checkpoint_folder import resolve
from asyncrlhf.validation import check

NAME, NUMBER = "policy", 1  # the one adapter of an engine


def adapter_arguments(config: GeneratorConfig, model: ModelConfig) -> dict[str, Any]:
    """The keywords of vLLM's ``EngineArgs`` for one adapter on the layers that the learner adapts; none without an
    adapter, or if it is merged into the weights. Raises ConfigError for a rank that vLLM does not have."""
    rank, applies = model.lora.r, config.vllm.enable_lora
    if not rank or not (config.gpus > 0 if applies is None else applies):
        return {}
    from vllm.config.lora import MaxLoRARanks

    ranks = get_args(MaxLoRARanks)
    check(
        rank <= max(ranks),
        f"model.lora.r={rank} is above vLLM's largest rank of an adapter; allowed: at most {max(ranks)}, or "
        "generator.vllm.enable_lora=false.",
    )
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": min(known for known in ranks if known >= rank),
        "lora_target_modules": _layers(zero_adapter(model)),
    }


def zero_adapter(model: ModelConfig) -> dict[str, torch.Tensor]:
    """Tensors of zeros under the names and with the shapes that the learner sends: the adapter that changes nothing."""
    skeleton: Any = meta_model(resolve(model.path), model.trust_remote_code)
    adapted = add_adapter(skeleton, model.lora)
    return {name: torch.zeros(tensor.shape) for name, tensor in trained_tensors(adapted).items()}


def _layers(names: Iterable[str]) -> list[str]:
    """The name suffixes of the layers with an adapter."""
    return sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in names})


def meta_model(folder: str, trust_remote_code: bool) -> nn.Module:
    """transformers' model without memory: the parameters that the learner sends, and which of them are tied."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return model


def adapter_request(folder: str, *, load_inplace: bool = False) -> Any:
    """vLLM's ``LoRARequest`` for the adapter. ``load_inplace``: read it from ``folder`` in place of the former one; a
    request without it uses what was read before."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(NAME, NUMBER, folder, load_inplace=load_inplace)


def adapter_files(tensors: Mapping[str, torch.Tensor], config: LoraConfig) -> dict[str, bytes]:
    """The files of PEFT's format by name. ``tensors``: as the learner sends them."""
    named = {f"base_model.model.{name.replace('.default.', '.')}": t.cpu().contiguous() for name, t in tensors.items()}
    settings = peft_settings(config).to_dict()
    settings["target_modules"] = _layers(tensors)
    return {"adapter_model.safetensors": save(named), "adapter_config.json": json.dumps(settings, default=str).encode()}


def write_adapter(worker: Any, folder: str, files: Mapping[str, bytes]) -> None:
    """Runs in a vLLM worker. Workers on one machine write the same files, each as a whole."""
    Path(folder).mkdir(mode=0o700, exist_ok=True)
    for name, content in files.items():
        own = Path(folder, f"{name}-{os.getpid()}")
        own.write_bytes(content)
        own.replace(Path(folder, name))


def remove_adapter(worker: Any, folder: str) -> None:
    """Runs in a vLLM worker, after vLLM has read the adapter."""
    shutil.rmtree(folder, ignore_errors=True)


def ignored_layers(worker: Any) -> list[str]:
    """Runs in a vLLM worker: the layers with a part of the adapter to which this worker does not apply it. vLLM leaves
    out what it does not know, without a word."""
    manager = worker.model_runner.lora_manager._adapter_manager
    return sorted(set(manager.get_adapter(NUMBER).loras) - set(manager.modules))


def check_applied(ignored: Sequence[Sequence[str]]) -> None:
    """``ignored``: of each worker. Raises ConfigError for a layer that no worker adapts."""
    nowhere = sorted(set(ignored[0]).intersection(*ignored[1:]))
    check(
        not nowhere,
        f"vLLM does not apply the adapter of model.lora to {', '.join(nowhere[:3])}"
        f"{f' and {len(nowhere) - 3} layers more' if len(nowhere) > 3 else ''}; allowed: other "
        "model.lora.target_modules, or generator.vllm.enable_lora=false.",
    )
