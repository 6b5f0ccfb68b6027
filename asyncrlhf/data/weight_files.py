"""A checkpoint's tensors by name, read from its safetensors files in parts; models without weights for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import nn

from asyncrlhf.data.checkpoint_folder import load_shape, resolve
from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.data.more_heads import forget_heads, more_heads
from asyncrlhf.errors import ConfigError


class WeightFiles:
    """The tensors of a local folder's safetensors files. Files are mapped, not read: only requested tensors cost
    memory."""

    def __init__(self, folder: Path) -> None:
        self._files: Mapping[str, Path] = {}
        for file in sorted(folder.glob("model*.safetensors")):
            with safe_open(file, "pt") as opened:
                self._files = {**self._files, **dict.fromkeys(opened.keys(), file)}
        self.folder = folder

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._files)

    def rows(self, name: str, first: int, last: int, *columns: slice) -> torch.Tensor:
        """The rows ``first`` to ``last`` (not included) of a tensor, and of these the ``columns``, in the file's
        dtype, in host memory.

        Raises ConfigError if the file cannot be read.
        """
        return self._read(name, (slice(first, last), *columns))

    def tensor(self, name: str) -> torch.Tensor:
        """The whole tensor; otherwise like :meth:`rows`."""
        return self._read(name, ...)

    def _read(self, name: str, where: Any) -> torch.Tensor:
        try:
            with safe_open(self._files[name], "pt") as file:
                part: torch.Tensor = file.get_slice(name)[where]
                return part
        except (OSError, SafetensorError, LookupError) as error:
            raise ConfigError(f"model.path={self.folder}: {name} cannot be read: {error}.") from error


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
    read = files.names - tied_names(model) - set(more_heads(files.names, shape))
    if persistent or {name for name, _ in model.named_parameters()} != read:
        return None
    forget_heads(model.config)
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model.eval(), files


def tied_names(model: nn.Module) -> set[str]:
    """The other names of parameters that have several; a file may hold them or not."""
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return every - {name for name, _ in model.named_parameters()}
