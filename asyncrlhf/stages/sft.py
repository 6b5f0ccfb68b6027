"""``asyncrlhf sft``: supervised fine-tuning on TRL's ``SFTTrainer``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.stages.data import Split, check_columns, check_rows, hold_out, read_rows
from asyncrlhf.stages.training import (
    Job,
    QuietTrainer,
    adapter_settings,
    heldout_ends,
    interrupted_words,
    model_source,
    prepare_job,
    refuse,
    refuse_without_template,
    run_trainer,
    trainer_arguments,
)

STAGE = "sft"
KEY = "sft"
FORMATS = (("messages",), ("prompt", "completion"), ("text",))


def run_sft(config: RunConfig) -> dict[str, Any]:
    """Fine-tune ``model.path`` on ``sft.path``; returns the summary. The new model is ``run_dir/model``.

    ``heldout`` of the summary: TRL's evaluation of the held-out rows before and after, and the perplexities that belong
    to their losses. Raises ConfigError before anything is trained.
    """
    settings = config.sft
    table = read_rows(settings.path, settings.split, f"{KEY}.path")
    columns = check_columns(table, FORMATS, f"{KEY}.path", settings.path)
    conversational = check_rows(table, columns, f"{KEY}.path", settings.path)
    job = prepare_job(config, settings, KEY, STAGE)
    refuse_without_template(job, conversational)
    refuse(
        settings.assistant_only_loss and columns != ("messages",),
        job,
        f"has {' and '.join(columns)}; {KEY}.assistant_only_loss=true is for messages.",
    )

    def heldout(split: str) -> Any:
        rows = read_rows(settings.path, split, f"{KEY}.path")
        check_rows(rows, check_columns(rows, (columns,), f"{KEY}.path", settings.path), f"{KEY}.path", settings.path)
        return rows

    split = hold_out(table, settings, KEY, heldout, lambda row: row[columns[0]])
    data = {"train": len(split.train), "heldout": len(split.heldout)}
    return run_trainer(job, STAGE, data, lambda: build_trainer(job, split, columns), _facts)


def build_trainer(job: Job, split: Split, columns: tuple[str, ...]) -> Any:
    """TRL's trainer, which loads the model and tokenises the rows."""
    from trl import SFTConfig, SFTTrainer  # seconds of imports, which wrong input need not wait for

    class Trainer(QuietTrainer, SFTTrainer):  # type: ignore[misc]
        """TRL's, without its telemetry."""

    arguments = SFTConfig(
        **trainer_arguments(job, bool(len(split.heldout))),
        packing=job.config.sft.packing,
        eval_packing=False,
        assistant_only_loss=job.config.sft.assistant_only_loss,
    )
    return Trainer(
        model=model_source(job),
        args=arguments,
        train_dataset=split.train.select_columns(list(columns)),
        eval_dataset=split.heldout.select_columns(list(columns)) if len(split.heldout) else None,
        processing_class=job.tokenizer,
        peft_config=adapter_settings(job, "CAUSAL_LM", None),
    )


def _facts(history: list[dict[str, Any]]) -> dict[str, Any]:
    ends = heldout_ends(history)
    return {"heldout": {end: {**row, "perplexity": float(np.exp(row["loss"]))} for end, row in ends.items()}}


def plain_words(summary: Mapping[str, Any]) -> str:
    """What came of it, for a terminal."""
    if summary["exit_reason"] != "done":
        return interrupted_words(summary)
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
