"""The language model of a multi-modal checkpoint as a checkpoint of its own in the cache folder, in place of it. It
avoids slow imports, above all torch, unless the copy is missing."""

from __future__ import annotations

import fcntl
import hashlib
import json
from functools import lru_cache
from pathlib import Path

import transformers


def text_folder(folder: Path, cache: Path) -> Path:
    """``folder``, or if it holds a multi-modal checkpoint, a folder below ``cache`` with its language model alone, as
    ``from_pretrained`` reads it. The first call writes it, tensor by tensor, while others wait.

    Raises ConfigError if the checkpoint has no language model that can be trained alone.
    """
    files = sorted(folder.glob("model*.safetensors"))
    if not files or not is_nested(folder / "config.json"):
        return folder
    shape = _shape(str(folder), (folder / "config.json").stat().st_mtime_ns)
    text = None if shape is None else shape.get_text_config(decoder=True)
    if shape is None or text is shape or not isinstance(text, transformers.PretrainedConfig):
        return folder
    facts = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in (folder / "config.json", *files)]
    key = hashlib.sha256(json.dumps([str(folder.resolve()), facts, transformers.__version__]).encode()).hexdigest()[:16]
    target = cache / f"text-{folder.name}-{key}"
    if not (target / "config.json").is_file():
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f".text-{key}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (target / "config.json").is_file():
                from asyncrlhf.models.text_copy import write_text_part

                write_text_part(folder, shape, target)
    return target


@lru_cache
def _shape(folder: str, changed: int) -> transformers.PretrainedConfig | None:
    """The config; None if transformers does not know it without the checkpoint's own code, which loads its model too.
    ``changed`` is the time of the file's last change."""
    try:
        shape: transformers.PretrainedConfig = transformers.AutoConfig.from_pretrained(folder)
        return shape
    except (OSError, ValueError, KeyError, ImportError):  # the code that loads the model reports it
        return None


def is_nested(config: Path) -> bool:
    """Whether the file holds the config of another model, as those of multi-modal models do. Reads one file."""
    try:
        found = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    parts = {name for name, value in found.items() if isinstance(value, dict) and name.endswith("_config")}
    return bool(parts - {"quantization_config"}) and "auto_map" not in found
