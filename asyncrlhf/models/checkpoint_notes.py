"""What the user should know about a checkpoint before it trains, one sentence each."""

from __future__ import annotations

from pathlib import Path

import transformers

from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.models.checkpoint_folder import copy_note, load_shape, resolve
from asyncrlhf.models.converted import conversion
from asyncrlhf.models.vocabulary import vocabulary_notes
from asyncrlhf.models.weight_files import WeightFiles, more_heads


def checkpoint_notes(config: ModelConfig, tokenizer: transformers.PreTrainedTokenizerBase) -> list[str]:
    """Sentences on a conversion, on weights that are not loaded and on tokens that the model lacks; mostly none."""
    folder = Path(resolve(config.path, config.trust_remote_code))
    notes = _conversion(config, folder)
    if folder.is_dir() and (heads := more_heads(WeightFiles(folder).names, load_shape(config))):
        notes.append(
            f"model.path={config.path}: transformers does not load its heads of multi-token prediction ({len(heads)} "
            f"tensors, such as {heads[0]}): they do not train, and exported checkpoints lack them."
        )
    return [*filter(None, [copy_note(config)]), *notes, *vocabulary_notes(config, tokenizer)]


def _conversion(config: ModelConfig, folder: Path) -> list[str]:
    made = conversion(str(folder))
    if not made:
        return []
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 2**30
    if made["kind"] == "mxfp4":
        return [
            f"model.path={config.path}: its MXFP4 weights were dequantised to bfloat16 in {folder}; they take "
            f"{size:.1f} GiB there, and as much memory in each engine."
        ]
    fresh = f" model.lora.r={config.lora.r} starts a new adapter on it." if config.lora.r else ""
    return [
        f"model.path={config.path} is an adapter: training starts from {made['base']} with the adapter merged into it, "
        f"in {folder} ({size:.1f} GiB).{fresh}"
    ]
