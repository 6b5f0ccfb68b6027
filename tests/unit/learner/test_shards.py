"""Reading sharded weights in pieces, and writing a checkpoint of them that no rank ever holds whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrlhf.learner.ranks import gathered, on_host, pieces
from asyncrlhf.learner.state import checkpoint
from asyncrlhf.learner.state.checkpoint import export_model
from asyncrlhf.learner.state.state_writer import StateWriter
from tests.unit.learner.worlds import llama


class Parts:
    """Stands for a model in shards; knows how many bytes were whole at once."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
        self.largest = 0

    def layout(self) -> Mapping[str, torch.Tensor]:
        return {name: tensor.to("meta") for name, tensor in self.tensors.items()}

    @contextmanager
    def gather(self, names: tuple[str, ...]) -> Iterator[Mapping[str, torch.Tensor]]:
        self.largest = max(self.largest, sum(self.tensors[name].nbytes for name in names))
        copies = {name: self.tensors[name].clone() for name in names}
        yield copies
        for tensor in copies.values():
            tensor.fill_(torch.nan)  # whoever kept it has kept nothing


def test_pieces_keep_the_order_and_the_limit_but_for_a_single_larger_tensor() -> None:
    sizes = {"a": 10, "b": 20, "c": 500, "d": 5, "e": 96}
    layout = {name: torch.empty(size, dtype=torch.uint8, device="meta") for name, size in sizes.items()}
    assert list(pieces(layout, 100)) == [("a", "b"), ("c",), ("d",), ("e",)]
    assert list(pieces({}, 100)) == []


def test_what_is_gathered_is_copied_before_it_is_let_go() -> None:
    parts = Parts(llama())
    copies = on_host(parts, rank=0)
    assert copies.keys() == parts.tensors.keys()
    assert all(torch.equal(copies[name], tensor) for name, tensor in parts.tensors.items())
    assert on_host(parts, rank=1) == {}
    assert [name for name, _ in gathered(parts)] == list(parts.tensors)


def exported(model: Any, folder: Path, parts: Any, rank: int) -> None:
    """Export, and wait for the disk."""
    writer = StateWriter(torch.device("cpu"))
    writer.begin(folder)
    export_model(model, folder, parts, rank, writer)
    writer.end()


@pytest.mark.parametrize("tied", [True, False])
def test_the_export_is_written_file_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool) -> None:
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 20_000)
    model = llama(tie_word_embeddings=tied)
    parts = Parts(model)
    exported(model, tmp_path, parts, rank=0)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 1 and (tmp_path / "model.safetensors.index.json").is_file()
    assert parts.largest <= 20_000
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    found = dict(loaded.named_parameters())
    assert found.keys() == parts.tensors.keys() and loaded.dtype == torch.float32
    assert all(torch.equal(found[name], tensor) for name, tensor in parts.tensors.items())


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    model = llama()
    exported(model, tmp_path / "model", Parts(model), rank=1)
    assert not list(tmp_path.rglob("*.*"))
