"""Copies the language model of a multi-modal checkpoint into a checkpoint of its own; and the way back: the trained
weights into a copy of the multi-modal checkpoint."""

from __future__ import annotations

import copy
import json
import logging
import re
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from asyncrlhf.models.text_part import TextPart, find_text_part
from asyncrlhf.models.weight_files import WeightFiles, check_weights, tied_names
from asyncrlhf.validation import check

INDEX = "model.safetensors.index.json"
FILE_BYTES = 5 * 10**9
# Files that belong to the multi-modal model alone.
NOT_COPIED = (
    "config.json", INDEX, "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip
_log = logging.getLogger(__name__)


def write_text_part(folder: Path, shape: transformers.PretrainedConfig, target: Path) -> None:
    """Write ``target``, which appears when it is complete, from the multi-modal checkpoint ``folder`` with the config
    ``shape``. Raises ConfigError if it has no language model that can be trained alone, or lacks some of its tensors;
    if it is quantised; or if the disk is too small."""
    key = f"model.path={folder}"
    check_weights(str(folder), "model.path")
    part = _text_part(shape, key)
    on_disk = sum(file.stat().st_size for file in folder.glob("model*.safetensors"))
    size = on_disk * part.text.num_parameters() / part.whole.num_parameters()
    free = shutil.disk_usage(target.parent).free
    check(
        size < free,
        f"{key}: its language model of {size / 1e9:,.1f} GB is copied to {target.parent}, which has "
        f"{free / 1e9:,.1f} GB left; set ASYNCRLHF_CACHE to a folder with more.",
    )
    _log.warning("%s: copying the %s, %.1f GB, to %s, once.", key, part.about, size / 1e9, target)
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=".text-"))
    try:
        _write_weights(part, WeightFiles(folder), scratch, key)
        for file in folder.iterdir():
            if file.suffix in (".json", ".model", ".txt", ".jinja") and file.name not in NOT_COPIED:
                shutil.copyfile(file, scratch / file.name)
        config = copy.deepcopy(part.text.config)
        config.architectures = [type(part.text).__name__]
        config.save_pretrained(scratch)
        scratch.chmod(0o755)  # not only for this user, as temporary folders are
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def put_back(trained: str | Path, whole: str | Path, out: str | Path) -> Path:
    """Write to ``out`` a copy of the multi-modal checkpoint ``whole`` with the weights of ``trained``, a checkpoint of
    a run that trained its language model; returns ``out``. Tensors keep the dtype that they have in ``whole``.

    Raises ConfigError if ``out`` exists, or unless ``trained`` has each tensor of the language model, with the same
    shape.
    """
    trained, whole, out = Path(trained).expanduser(), Path(whole).expanduser(), Path(out).expanduser()
    check(not out.exists(), f"{out} exists; give a new folder for the checkpoint with the trained weights.")
    part, new = _text_part(transformers.AutoConfig.from_pretrained(whole), str(whole)), WeightFiles(trained)
    ours = {theirs: name for name, theirs in part.names.items()}
    entries = _conversions(part, WeightFiles(whole)).items()
    names = {c.source_patterns[0]: ours[name] for name, c in entries if isinstance(c, WeightRenaming)}
    odd = sorted({*names.values()} ^ new.names)
    check(
        len(names) == len(entries) and not odd,
        f"The tensors of {trained} cannot be put in the places of those of {whole}, which has others or stores them in "
        f"another form{f', such as {odd[0]}' if odd else ''}.",
    )
    out.mkdir(parents=True)
    for file in sorted(file for file in whole.iterdir() if file.is_file()):
        if not file.match("model*.safetensors"):
            shutil.copyfile(file, out / file.name)
            continue
        with safe_open(file, "pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in [*opened.keys()]}
        for name in tensors.keys() & names.keys():
            trained_one = new.tensor(names[name])
            check(
                trained_one.shape == tensors[name].shape,
                f"{trained}: {names[name]} has the shape {tuple(trained_one.shape)}, in {whole} "
                f"{tuple(tensors[name].shape)}.",
            )
            tensors[name] = trained_one.to(tensors[name].dtype)
        save_file(tensors, out / file.name, {"format": "pt"})
    return out


def _text_part(shape: transformers.PretrainedConfig, where: str) -> TextPart:
    check(
        not getattr(shape, "quantization_config", None),
        f"{where} is a quantised multi-modal checkpoint; allowed: one that is not quantised.",
    )
    return find_text_part(shape, where)


def _write_weights(part: TextPart, files: WeightFiles, out: Path, key: str) -> None:
    """Write the language model's tensors in files of about FILE_BYTES, of which one is in memory at a time. Raises
    ConfigError if one of them is missing or has another shape than the model's."""
    names = {theirs: ours for ours, theirs in part.names.items()}
    shapes = {ours: tensor.shape for ours, tensor in part.text.state_dict().items()}
    conversions = _conversions(part, files)
    for tied in tied_names(part.text):
        _settle_tie(part, files, conversions, tied)
    written: dict[str, str] = {}  # the file of each tensor
    batch: dict[str, torch.Tensor] = {}
    found: set[str] = set()
    # Transformers may join or split tensors of one layer when it saves them.
    for _, layer in groupby(_converted(part, conversions), lambda pair: _layer(pair[0])):
        for theirs, tensor in layer:
            ours = names[theirs]
            check(
                tensor.shape == shapes[ours],
                f"{key}: {theirs} has the shape {tuple(tensor.shape)}; its model needs {tuple(shapes[ours])}.",
            )
            batch[ours] = tensor
        found |= batch.keys()
        if sum(tensor.nbytes for tensor in batch.values()) > FILE_BYTES:
            written |= _write_file(part, batch, out, len({*written.values()}))
            batch = {}
    absent = sorted(shapes.keys() - found - tied_names(part.text).keys())
    check(not absent, f"{key} lacks {len(absent)} tensors of its language model, such as {absent and absent[0]}.")
    written |= _write_file(part, batch, out, len({*written.values()}))
    (out / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": written}, indent=1), encoding="utf-8")


def _settle_tie(part: TextPart, files: WeightFiles, conversions: dict[str, Any], tied: str) -> None:
    """A checkpoint may hold the output layer beside the embedding to which its config ties it. As transformers does,
    tie it only if both are equal."""
    head = conversions.get(part.names[tied])
    if head is None:
        return
    words = part.text.get_input_embeddings().weight
    first = next(name for name, parameter in part.text.named_parameters() if parameter is words)
    embedding = conversions.get(part.names[first])
    if embedding is not None and torch.equal(*(files.tensor(c.source_patterns[0]) for c in (head, embedding))):
        del conversions[part.names[tied]]
    else:
        part.text.config.tie_word_embeddings = False


def _write_file(part: TextPart, batch: dict[str, torch.Tensor], out: Path, number: int) -> dict[str, str]:
    """Write one file of the checkpoint; returns the file's name by that of each tensor in it."""
    file = out / f"model-{number + 1:05d}.safetensors"
    plain = revert_weight_conversion(part.text, batch)
    save_file({name: tensor.contiguous() for name, tensor in plain.items()}, file, {"format": "pt"})
    return dict.fromkeys(plain, file.name)


def _layer(name: str) -> str:
    """The name up to the first number."""
    found = re.search(r"\.\d+\.", name)
    return name[: found.end()] if found else name


def _converted(part: TextPart, conversions: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The language model's tensors by their names in the multi-modal model, read, renamed, split and joined as
    transformers does when it loads that model."""
    for first, conversion in conversions.items():
        for name, tensor in conversion.convert(first, model=part.whole, config=part.whole.config).items():
            yield name, tensor[0] if isinstance(tensor, list) else tensor


def _conversions(part: TextPart, files: WeightFiles) -> dict[str, Any]:
    """Transformers' conversion of each tensor of the language model, or of the first of those that are split from one,
    by its name in the multi-modal model; its inputs are read when it is used."""
    every = get_model_conversion_mapping(part.whole)
    renamings = [entry for entry in every if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in every if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    whole, wanted = part.whole.state_dict(), {*part.names.values()}
    found: dict[str, Any] = {}
    for source in sorted(files.names, key=dot_natural_key):
        name, pattern = rename_source_key(source, renamings, converters, part.whole.base_model_prefix, whole)
        if name not in whole and source in whole:
            name, pattern = source, None
        if name in wanted:
            made = WeightRenaming(source, name) if pattern is None else copy.deepcopy(by_pattern[pattern])
            read: Any = partial(files.tensor, source)
            found.setdefault(name, made).add_tensor(name, source, pattern or source, read)
    return found
