"""Finds a pretrained checkpoint by name and loads its tokenizer and its config. It avoids slow imports,
above all torch, for processes that do not run a model."""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
from contextlib import suppress
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import snapshot_download
from transformers.utils import cached_file

from asyncrlhf.data.data_config import ModelConfig, refuse_missing_model
from asyncrlhf.errors import ConfigError
from asyncrlhf.models.converted import cache_folder, converted, smollm2
from asyncrlhf.validation import check

SPANS = re.compile(r"window|chunk")  # settings that say how far a layer sees, in tokens
# The architecture's longest text if its config does not have it.
DEFAULT_CONTEXT = 2048


def resolve(path: str, trust_remote_code: bool = False) -> str:
    """A folder or hub name that ``from_pretrained`` takes, with a causal language model.

    What is no whole plain checkpoint is converted once (:func:`asyncrlhf.models.converted.converted`), and the
    language model of a multi-modal one is copied once (:func:`~asyncrlhf.models.checkpoint_folder.text_folder`); only a
    conversion runs the checkpoint's own code, with ``trust_remote_code``.
    """
    given = _whole(path, trust_remote_code)
    local = Path(given if Path(given).is_dir() else _folder_if_multi_modal(given))
    return str(text_folder(local, cache_folder())) if local.is_dir() else given


PACKAGED = {"tiny": "tiny-arithmetic", "tiny_tools": "tiny-tools"}  # the folders of packaged checkpoints by name


def _whole(path: str, trust_remote_code: bool) -> str:
    given = named(path)
    return given if path in (*PACKAGED, "smollm2") else converted(given, trust_remote_code)


def named(path: str) -> str:
    """The checkpoint of this name as it is: a folder or hub name.


    ``tiny`` and ``tiny_tools`` are packaged. A path that looks local and does not exist is refused here, before any
    network is asked.
    """
    if path in PACKAGED:
        return str(resources.files("asyncrlhf") / "assets" / PACKAGED[path])
    if path == "smollm2":
        return str(smollm2())
    refuse_missing_model(path)
    local = Path(path).expanduser()
    return str(local) if local.is_dir() else path


def copy_note(config: ModelConfig) -> str | None:
    """A sentence for the user if the run trains a part of the checkpoint; else None."""
    used = resolve(config.path, config.trust_remote_code)
    if used == _whole(config.path, config.trust_remote_code):
        return None
    return (
        f"model.path={config.path} is a multi-modal checkpoint: only its language model is trained, sampled and saved, "
        f"from the copy {used}."
    )


@lru_cache
def _folder_if_multi_modal(name: str) -> str:
    """The hub's checkpoint as a folder here if it is multi-modal, else its name."""
    try:
        found = cached_file(name, "config.json")
        if found is None or not is_nested(Path(found)):
            return name
        return snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"])
    except (OSError, ValueError):  # reported by what loads it
        return name


def load_tokenizer(config: ModelConfig) -> transformers.PreTrainedTokenizerBase:
    """The checkpoint's tokenizer, with an eos token (if it has none, one with which the checkpoint says that texts end)
    and a pad token (its eos token if it has none)."""
    # AutoTokenizer imports the model classes, which costs each process three seconds; this class does not need them.
    kind = transformers.PreTrainedTokenizerFast if config.path in PACKAGED else transformers.AutoTokenizer
    tokenizer = from_pretrained(kind, config)
    if tokenizer.eos_token_id is None:
        known = set(tokenizer.get_vocab().values())
        ends = [token for token in stated_ends(config) if token in known]
        check(ends, f"The tokenizer of model.path={config.path} has no eos token, so no response could ever end.")
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ends[0])
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def stated_ends(config: ModelConfig) -> list[int]:
    """The ids that end a text by the checkpoint's ``generation_config.json`` and ``config.json``, in this order. As
    these files state them: a configuration's class has defaults, which are tokens like others."""
    folder = resolve(config.path, config.trust_remote_code)
    stated: list[Any] = []
    with suppress(OSError):  # it has none
        stated.append(transformers.GenerationConfig.from_pretrained(folder).eos_token_id)
    with suppress(OSError, ValueError):  # the load of the model reports it
        plain, _ = transformers.PretrainedConfig.get_config_dict(folder)
        inner = plain.get("text_config")
        stated += [plain.get("eos_token_id"), inner.get("eos_token_id") if isinstance(inner, dict) else None]
    found = [token for given in stated for token in (given if isinstance(given, list | tuple) else [given])]
    return list(dict.fromkeys(token for token in found if isinstance(token, int) and token >= 0))


def load_shape(config: ModelConfig) -> transformers.PretrainedConfig:
    """The checkpoint's config, without weights."""
    shape: transformers.PretrainedConfig = from_pretrained(transformers.AutoConfig, config)
    return shape


def context_length(config: ModelConfig) -> int:
    """The longest text in tokens, prompt and response together."""
    return context_of(load_shape(config))


def context_of(shape: transformers.PretrainedConfig) -> int:
    """The longest text in tokens by a model's config, or DEFAULT_CONTEXT if nothing limits it."""
    text: Any = shape.get_text_config()
    limits = (getattr(text, name, None) for name in ("max_position_embeddings", "max_seq_len", "seq_length"))
    return next((int(limit) for limit in limits if limit), DEFAULT_CONTEXT)


def longest_span(shape: transformers.PretrainedConfig) -> int:
    """The most tokens of a window or a chunk in a model's config; 0 if it has none."""
    settings = shape.get_text_config().to_dict()
    return max((v for name, v in settings.items() if SPANS.search(name) and type(v) is int), default=0)


def from_pretrained(auto: Any, config: ModelConfig, **options: Any) -> Any:
    """``auto.from_pretrained`` of the checkpoint; raises ConfigError if it cannot be loaded."""
    folder = resolve(config.path, config.trust_remote_code)
    try:
        return auto.from_pretrained(folder, trust_remote_code=config.trust_remote_code, **options)
    # The hub client and transformers raise these for whatever is wrong with a name or a folder.
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
        if "trust_remote_code" in str(error) and not config.trust_remote_code:
            reason = (
                "transformers does not know its model type, and the checkpoint brings Python code of its own; "
                "model.trust_remote_code=true allows it to run, once you have read it"
            )
        raise ConfigError(f"model.path={config.path} could not be loaded: {reason}.") from error


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
