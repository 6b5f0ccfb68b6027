"""Models without weights, beside the files that hold these."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers

from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.models.checkpoint_folder import load_shape, resolve
from asyncrlhf.models.more_heads import forget_heads, more_heads
from asyncrlhf.models.weight_files import WeightFiles, tied_names


def load_blank(config: ModelConfig, dtype: torch.dtype) -> tuple[transformers.PreTrainedModel, WeightFiles] | None:
    """The model in ``eval()``, with its parameters on the device ``meta`` and its computed buffers, and the files
    with the parameters; None if only transformers can load it.

    That is so for hub names, arguments of ``from_pretrained``, tensors that transformers renames, splits or joins
    while loading (fused experts, quantised weights), and a checkpoint that lacks some.
    """
    folder, shape = Path(resolve(config.path)), load_shape(config)
    if config.model_init_kwargs or not folder.is_dir() or getattr(shape, "quantization_config", None):
        return None
    options: dict[str, Any] = {"trust_remote_code": config.trust_remote_code, "dtype": dtype}
    with accelerate.init_empty_weights(include_buffers=False):
        model = transformers.AutoModelForCausalLM.from_config(shape, **options)
    model.tie_weights()  # again: a parameter on ``meta`` is replaced by a new object each time it is set
    files = WeightFiles(folder)
    persistent = {name for name, _ in model.named_buffers()} & model.state_dict().keys()
    read = files.names - tied_names(model).keys() - set(more_heads(files.names, shape))
    if persistent or {name for name, _ in model.named_parameters()} != read:
        return None
    forget_heads(model.config)
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model.eval(), files
