"""``asyncrlhf sft``: supervised fine-tuning on TRL's ``SFTTrainer``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.stages.data import Split, check_columns, check_rows, hold_out, read_rows
from asyncrlhf.stages.training import Job, build_trainer, heldout_ends, prepare_job, run_trainer
from asyncrlhf.validation import check

if TYPE_CHECKING:
    from datasets import Dataset

FORMATS = (("messages",), ("prompt", "completion"), ("text",))


def run_sft(config: RunConfig) -> dict[str, Any]:
    """Fine-tune ``model.path`` on ``sft.path``; returns the summary. The new model is ``run_dir/model``.

    ``heldout`` of the summary: TRL's evaluation of the held-out rows before and after, and the perplexities of their
    losses. Raises ConfigError before anything is trained.
    """
    settings = config.sft

    def read(split: str, formats: Sequence[Sequence[str]] = FORMATS) -> tuple[Dataset, tuple[str, ...], bool]:
        rows = read_rows(settings.path, split, "sft.path")
        columns = check_columns(rows, formats, "sft.path", settings.path)
        return rows, columns, check_rows(rows, columns, "sft.path", settings.path)

    table, columns, conversational = read(settings.split)
    job = prepare_job(config, settings, "sft", conversational)
    check(
        not (settings.trainer_kwargs or {}).get("assistant_only_loss") or columns == ("messages",),
        f"sft.path={settings.path} has {' and '.join(columns)}; assistant_only_loss is for messages.",
    )
    split = hold_out(table, settings, "sft", lambda name: read(name, [columns])[0], lambda row: row[columns[0]])
    data = {"train": len(split.train), "heldout": len(split.heldout)}
    return run_trainer(job, data, lambda: _trainer(job, split, columns), _facts)


def _trainer(job: Job, split: Split, columns: Sequence[str]) -> Any:
    from trl import SFTConfig, SFTTrainer  # slow imports, after the checks of the input

    train, heldout = (rows.select_columns(list(columns)) for rows in (split.train, split.heldout))
    return build_trainer(job, SFTTrainer, SFTConfig, train, heldout, {"task_type": "CAUSAL_LM"}, eval_packing=False)


def _facts(history: list[dict[str, Any]]) -> dict[str, Any]:
    ends = heldout_ends(history)
    return {"heldout": {end: {**row, "perplexity": float(np.exp(row["loss"]))} for end, row in ends.items()}}


def plain_words(summary: Mapping[str, Any]) -> str:
    """The result of a finished run, for a terminal."""
    lines = [f"Done: {summary['steps']} steps on {summary['data']['train']} rows."]
    ends = summary["heldout"]
    if ends:
        before, after = ends["before"], ends["after"]
        lines.append(
            f"Held-out loss {before['loss']:.3f} to {after['loss']:.3f} (perplexity {before['perplexity']:.2f} to "
            f"{after['perplexity']:.2f}) on {summary['data']['heldout']} rows."
        )
    lines.append(f"The model is in {summary['model_dir']}; the next stage takes it as model.path.")
    return "\n".join(lines)
