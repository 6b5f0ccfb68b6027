"""Checkpoints as users bring them, made from the packaged one: a padded output layer, other end tokens, other files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.models.checkpoint_folder import load_tokenizer
from asyncrlhf.models.pretrained import load_model

TOKENS = 19  # of the packaged tokenizer
EOS = 2


def found(
    folder: Path, *, rows: int = TOKENS, model: PreTrainedModel | None = None, without_eos: bool = False
) -> ModelConfig:
    """The packaged model and tokenizer in ``folder``, the model with ``rows`` rows; those beyond the tokenizer's have
    logits as large as the others'."""
    model = model or load_model(ModelConfig())
    if rows != TOKENS:
        torch.manual_seed(0)
        model.resize_token_embeddings(rows, mean_resizing=False)
        table = model.get_input_embeddings().weight
        with torch.no_grad():
            table[TOKENS:] = table[torch.randint(0, TOKENS, (max(0, rows - TOKENS),))]
    model.save_pretrained(folder)
    tokenizer = load_tokenizer(ModelConfig())
    tokenizer.save_pretrained(folder)
    if without_eos:
        edit(folder / "tokenizer_config.json", eos_token=None)
    return ModelConfig(path=str(folder))


def edit(file: Path, **changes: Any) -> Mapping[str, Any]:
    """Change a JSON file; None removes an entry."""
    content = {**json.loads(file.read_text()), **changes}
    content = {name: value for name, value in content.items() if changes.get(name, "") is not None}
    file.write_text(json.dumps(content))
    return content
