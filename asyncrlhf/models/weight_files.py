"""A checkpoint's tensors by name, read from its safetensors files in parts; which of them no model has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from asyncrlhf.errors import ConfigError
from asyncrlhf.validation import check


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


def tied_names(model: nn.Module) -> dict[str, str]:
    """Names of tied parameters beyond the first, which a file may hold or not, and that first name."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    names = ((name, first[id(p)]) for name, p in model.named_parameters(remove_duplicate=False))
    return {name: original for name, original in names if name != original}


def check_weights(folder: str, key: str) -> None:
    """Raise ConfigError if a local checkpoint's weights are incomplete, by the headers of its safetensors files;
    reads no weights. Other formats and hub names are not checked."""
    local = Path(folder)
    if not local.is_dir():
        return
    index = local / "model.safetensors.index.json"
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()) if index.is_file() else set()
    except (OSError, ValueError, LookupError, AttributeError) as error:
        raise ConfigError(f"{key}={folder}: {index.name} cannot be read: {error}.") from error
    for file in [*(local / str(name) for name in sorted(shards)), *sorted(local.glob("*.safetensors"))]:
        try:
            with file.open("rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
                header = json.loads(opened.read(min(size, file.stat().st_size)))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(f"{key}={folder}: {file.name} is not a complete safetensors file ({error}).") from error
        wanted, there = 8 + size + max(ends, default=0), file.stat().st_size
        check(there >= wanted, f"{key}={folder}: {file.name} is cut off: it has {there:,} of {wanted:,} bytes.")


# In a configuration: how many there are, by the two names that vLLM reads.
_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_NAMED = re.compile(r"(?:^|\.)mtp[._]")
_LAYER = re.compile(r"^(?:model\.)?(?:language_model\.)?layers\.(\d+)\.")


def more_heads(names: Iterable[str], shape: Any) -> list[str]:
    """Those of a checkpoint's tensors ``names`` that belong to such heads: named so, or of layers after the last."""
    last = int(getattr(shape.get_text_config(), "num_hidden_layers", 2**31))

    def beyond(name: str) -> bool:
        layer = _LAYER.match(name)
        return bool(_NAMED.search(name)) or (layer is not None and int(layer[1]) >= last)

    return sorted(filter(beyond, names))


def forget_heads(config: Any) -> None:
    """Let the configuration of a loaded model promise no such heads: engines that load an export would look for
    their weights."""
    inner = config.get_text_config()
    for name in _COUNTS:
        if getattr(inner, name, 0):
            setattr(inner, name, 0)
