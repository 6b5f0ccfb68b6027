"""Nested states as safetensors files: tensors as they are, all else as JSON in the header; no pickle, no code."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor

from asyncrlhf.errors import CheckpointError
from asyncrlhf.learner.ranks import Spans, local_spans, overlaps

Plain = Any  # JSON values: lists and scalars are themselves; an object's only key names the type that it represents
TENSOR, DICT, TUPLE = "tensor", "dict", "tuple"
STATE = "state"  # of the header's metadata
PIECE = 1 << 20  # bytes written and hashed at a time: they come from memory once, and the steps beside it keep theirs
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
# Exceptions of the readers for a file that is not such a state.
UNREADABLE = (OSError, SafetensorError, LookupError, TypeError, ValueError, AttributeError, RecursionError)


def split(
    state: Any, whole: bool = True, ours: Callable[[DTensor], bool] = lambda tensor: True
) -> tuple[Plain, dict[str, torch.Tensor]]:
    """The state as plain JSON values with numbers in place of tensors, and the tensors by number; one that occurs twice
    is listed once. Of a DTensor the local part is listed, with its ``spans`` and the whole shape; if it is not
    ``ours``, an empty part, because another rank lists it.

    Raises CheckpointError for other objects; with ``whole`` False such entries of dicts are left out.
    """
    tensors: dict[str, torch.Tensor] = {}
    seen: dict[Any, str] = {}

    def number(tensor: torch.Tensor) -> str:
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        key = seen.get(place) if tensor.numel() else None
        if key is None:
            key = seen[place] = str(len(tensors))
            tensors[key] = tensor
        return key

    def plain(value: Any) -> Plain:
        if isinstance(value, DTensor):
            local = value.to_local().detach().contiguous()
            if value.ndim and not ours(value):
                none = local.new_empty([0] * value.ndim)
                return {TENSOR: number(none), "spans": [[] for _ in value.shape], "shape": list(value.shape)}
            return {TENSOR: number(local), "spans": local_spans(value), "shape": list(value.shape)}
        if isinstance(value, torch.Tensor):
            return {TENSOR: number(value.detach())}
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, Mapping):
            return {DICT: [[plain(key), own] for key, item in value.items() if (own := entry(item)) is not missing]}
        if isinstance(value, (tuple, list)):
            items = [plain(item) for item in value]
            return {TUPLE: items} if isinstance(value, tuple) else items
        raise CheckpointError(f"a state of the learner holds a {type(value).__qualname__}, which no checkpoint can.")

    missing = object()

    def entry(item: Any) -> Plain:
        try:
            return plain(item)
        except CheckpointError:
            if whole:
                raise
            return missing

    return plain(state), tensors


def write_file(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> dict[str, Any]:
    """Write one safetensors file directly from contiguous host tensors; returns its seal, see
    ``data.checkpoint_manifest``: the bytes are hashed as they are written, not read back."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest, size = hashlib.sha256(), 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for part in (memoryview(struct.pack("<Q", len(text))), memoryview(text), *map(_bytes, tensors.values())):
            for start in range(0, len(part), PIECE):
                piece = part[start : start + PIECE]
                file.write(piece)
                digest.update(piece)
            size += len(part)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def _bytes(tensor: torch.Tensor) -> memoryview:
    flat: Any = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
    return memoryview(flat)


def read_state(path: Path, tensors: bool = True) -> Any:
    """The state, tensors in host memory; without ``tensors`` it has their numbers in the header in place of them.
    Raises CheckpointError for a file that is not a state."""
    try:
        with safe_open(path, "pt") as file:
            return _joined(json.loads(file.metadata()[STATE]), file if tensors else None)
    except UNREADABLE as error:
        raise _unreadable(path, error) from error


def _joined(value: Plain, file: Any) -> Any:
    if isinstance(value, list):
        return [_joined(item, file) for item in value]
    if not isinstance(value, dict):
        return value
    if TENSOR in value:
        return value[TENSOR] if file is None else file.get_tensor(value[TENSOR])
    if TUPLE in value:
        return tuple(_joined(item, file) for item in value[TUPLE])
    return {_joined(key, file): _joined(item, file) for key, item in value[DICT]}


def read_sharded(template: Any, files: Sequence[Path]) -> Any:
    """The state that ranks wrote in one file each, in the layout of ``template`` on this rank: its DTensors are filled
    in place with this rank's part. Raises CheckpointError if the files lack a part that the template needs."""
    try:
        with ExitStack() as stack:
            opened = [stack.enter_context(safe_open(file, "pt")) for file in files]
            return _fill(template, [json.loads(file.metadata()[STATE]) for file in opened], opened)
    except UNREADABLE as error:
        raise _unreadable(files[0].parent, error) from error


def _fill(template: Any, parts: Sequence[Plain], files: Sequence[Any]) -> Any:
    if isinstance(template, DTensor):
        _copy_parts(template.to_local(), local_spans(template), template.shape, parts, files)
        return template
    if isinstance(template, Mapping):
        entries = [{_joined(key, None): item for key, item in part[DICT]} for part in parts]
        if template.keys() != entries[0].keys():
            raise ValueError(f"{sorted(map(str, template.keys() ^ entries[0].keys()))[0]} is in one of the two alone")
        return {key: _fill(item, [entry[key] for entry in entries], files) for key, item in template.items()}
    if isinstance(template, list):
        return [_fill(item, [part[i] for part in parts], files) for i, item in enumerate(template)]
    return _joined(parts[0], files[0])


def read_parts(
    files: Sequence[Path], names: Collection[str], own: Callable[[str, Any], Any] = lambda name, value: value
) -> dict[str, dict[str, Any]]:
    """The states of ``names`` (those that are there) out of files in which each rank wrote its own, by name. Tensors of
    which ranks wrote parts are joined; ``own(name, value)`` is kept of each, so that one at a time is whole in memory.
    Raises CheckpointError for files that are not such states, or lack a part."""
    found: dict[str, dict[str, Any]] = {}
    try:
        with ExitStack() as stack:
            written: dict[str, list[tuple[dict[str, Plain], Any]]] = {}
            for file in (stack.enter_context(safe_open(path, "pt")) for path in files):
                for name, states in json.loads(file.metadata()[STATE])[DICT]:
                    written.setdefault(name, []).append((dict(states[DICT]), file))
            for name in written.keys() & set(names):
                parts, opened = zip(*written[name], strict=True)
                found[name] = {key: own(name, _join([part[key] for part in parts], opened)) for key in parts[0]}
    except UNREADABLE as error:
        raise _unreadable(files[0].parent, error) from error
    return found


def _join(parts: Sequence[Plain], files: Sequence[Any]) -> Any:
    """One value of which each file has a part, or the whole."""
    first = parts[0]
    if not isinstance(first, dict) or "spans" not in first:
        return _joined(first, files[0])
    whole = torch.empty(first["shape"], dtype=files[0].get_tensor(first[TENSOR]).dtype)
    _copy_parts(whole, [[[0, size]] for size in whole.shape], whole.shape, parts, files)
    return whole


@torch.no_grad()
def _copy_parts(
    local: torch.Tensor, own: Spans, shape: torch.Size, parts: Sequence[Plain], files: Sequence[Any]
) -> None:
    """Fill ``local``, the part ``own`` of a tensor of ``shape``, from the parts in the files, which do not overlap."""
    found = 0
    if not shape:  # one number, which every rank has
        parts, files = parts[:1], files[:1]
    for part, file in zip(parts, files, strict=True):
        if part["shape"] != list(shape):
            raise ValueError(f"a tensor has the shape {part['shape']}, and {list(shape)} is asked for")
        saved = file.get_slice(part[TENSOR])
        for here, there in overlaps(own, part["spans"]):
            local[here] = saved[there]
            found += local[here].numel()
    if found != local.numel():
        raise ValueError(f"{found} of a tensor's {local.numel()} numbers are there")


def _unreadable(path: Path, error: BaseException) -> CheckpointError:
    said = str(error).splitlines()[0] if str(error) else ""
    return CheckpointError(f"{path} does not hold a learner's state ({type(error).__name__}: {said}).")
