"""The common part of `sft` and `reward-model`: checks, TRL's arguments, the run itself and the exported model."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerBase, PrinterCallback
from transformers.utils import logging as transformers_logging

from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.config.stage_config import TrainerConfig
from asyncrlhf.errors import ConfigError
from asyncrlhf.models.adapter import peft_settings
from asyncrlhf.models.checkpoint_folder import context_length, load_tokenizer, resolve
from asyncrlhf.models.checkpoint_notes import checkpoint_notes
from asyncrlhf.models.pretrained import check_model
from asyncrlhf.models.vocabulary import check_template
from asyncrlhf.orchestrator.run import RUNS
from asyncrlhf.records.write.checkpoint import FOLDER, find_checkpoints, newest_whole
from asyncrlhf.records.write.record_marker import refuse_used_folder
from asyncrlhf.records.write.whole_files import writing_to
from asyncrlhf.stages.stage_record import (
    LEFT_OUT,
    MARKER_FILE,
    MODEL_FOLDER,
    StageRecord,
    is_main,
    read_marker,
    run_folder,
    whole,
)
from asyncrlhf.validation import check, did_you_mean

if TYPE_CHECKING:
    from datasets import Dataset

# Settings of TrainerConfig that are not TRL's or need a translation; the others are TRL's under the same names.
_OURS = ("path", "split", "heldout_split", "heldout_fraction", "max_length", "trainer_kwargs")
# Ours where TRL's own defaults differ: it would compute activations twice, and in bfloat16, without being asked.
_DEFAULTS = {"gradient_checkpointing": False, "bf16": False}


@dataclass(frozen=True)
class Job:
    """A stage that passed its checks. ``key``: the name of its group of settings, ``settings``: the group."""

    config: RunConfig
    stage: str  # the name of its command
    key: str
    settings: TrainerConfig
    run_dir: Path
    tokenizer: PreTrainedTokenizerBase
    max_length: int  # tokens, within the model's context
    resume: Path | None
    notes: Sequence[str] = ()  # about skipped checkpoints, and the model's


def prepare_job(config: RunConfig, settings: TrainerConfig, stage: str, conversational: bool) -> Job:
    """Check all but the rows themselves, which are ``conversational`` or not; raises ConfigError with one sentence."""
    transformers_logging.disable_progress_bar()
    key, found = stage.replace("-", "_"), torch.cuda.device_count()
    check(
        found <= 1 or int(os.environ.get("WORLD_SIZE", "1")) > 1,
        f"{found} GPUs are visible to one process, which trains on one; start it with accelerate launch -m asyncrlhf "
        f"{stage}, or make one visible with CUDA_VISIBLE_DEVICES.",
    )
    check(
        not (settings.trainer_kwargs or {}).get("fp16") or found,
        f"{key}.trainer_kwargs.fp16=true needs a GPU; allowed here: bf16=true, or neither.",
    )
    check_model(config.model)
    given = Path(config.run_dir) if config.run_dir else None
    runs = RUNS / f"{config.name}-{stage}"
    checkpoints = find_checkpoints(config.checkpoint.resume, given, runs, MARKER_FILE, stage)
    folder = checkpoints[0].parents[1] if checkpoints and given is None else run_folder(config, stage)
    resume, passed_over = newest_whole(checkpoints, partial(whole, run_dir=folder))
    limit, tokenizer = min(settings.max_length, context_length(config.model)), load_tokenizer(config.model)
    if conversational:
        check_template(config.model, tokenizer)
    notes = [*passed_over, *checkpoint_notes(config.model, tokenizer)]
    check(
        tokenizer.chat_template or not conversational,
        f"{key}.path={settings.path} holds conversations, but the tokenizer of model.path={config.model.path} has no "
        "chat template.",
    )
    return Job(config, stage, key, settings, folder, tokenizer, limit, resume, notes)


def trainer_arguments(job: Job, heldout: bool) -> dict[str, Any]:
    """The common arguments of TRL's ``SFTConfig`` and ``RewardConfig``."""
    settings, config = job.settings, job.config
    every, between = config.checkpoint.every, config.eval_every or 0
    return {
        "output_dir": str(job.run_dir / FOLDER),
        "seed": config.seed,
        **{f.name: getattr(settings, f.name) for f in fields(TrainerConfig) if f.name not in _OURS},
        "per_device_eval_batch_size": settings.per_device_train_batch_size,
        "max_length": job.max_length,
        "use_cpu": not torch.cuda.is_available(),  # or transformers refuses bfloat16 there
        "eval_on_start": heldout and job.resume is None,
        "eval_strategy": "steps" if heldout and between else "no",
        "eval_steps": between or None,
        "save_strategy": "steps" if every else "no",
        "save_steps": every or 500,  # only read with save_strategy
        "save_total_limit": config.checkpoint.keep,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": torch.cuda.is_available(),
        # Optimizers hold float32 master weights; bf16 and fp16 set autocast.
        "model_init_kwargs": {
            "dtype": "float32",
            "trust_remote_code": config.model.trust_remote_code,
            "use_safetensors": True,
        },
    }


def build_trainer(
    job: Job, trainer: Any, arguments: Any, train: Dataset, heldout: Dataset, adapter: Mapping[str, Any], **own: Any
) -> Any:
    """TRL's ``trainer``, which loads the model and tokenises the rows. ``arguments``: the class of its arguments;
    ``own``: those that only this class has; ``adapter``: PEFT's arguments beside ``model.lora``."""

    class Trainer(trainer):  # type: ignore[misc]
        def _send_telemetry(self) -> None:
            """Nothing of a run leaves the machine unasked."""

    lora = job.config.model.lora
    given = trainer_arguments(job, bool(len(heldout))) | own
    return Trainer(
        model=resolve(job.config.model.path),
        args=_with_keywords(arguments, given, job.settings.trainer_kwargs or {}, f"{job.key}.trainer_kwargs"),
        train_dataset=train,
        eval_dataset=heldout if len(heldout) else None,
        processing_class=job.tokenizer,
        peft_config=peft_settings(lora, **adapter) if lora.r else None,
    )


def _with_keywords(arguments: Any, given: Mapping[str, Any], more: Mapping[str, Any], key: str) -> Any:
    """An instance of TRL's class ``arguments``; raises ConfigError for a keyword that is unknown to it, refused by it,
    or among those ``given`` by other settings."""
    known = [f.name for f in fields(arguments)]
    for name in more:
        check(name in known, f"{key}.{name} is not a field of TRL's {arguments.__name__}{did_you_mean(name, known)}.")
        check(name not in given, f"{key}.{name} follows from other settings; see asyncrlhf train --help {name}.")
    try:
        return arguments(**_DEFAULTS | dict(given) | dict(more))
    except (TypeError, ValueError) as error:
        if not more:
            raise
        raise ConfigError(f"{key}={dict(more)} is refused by TRL: {' '.join(str(error).split())}.") from error


def run_trainer(
    job: Job, data: Mapping[str, int], build: Callable[[], Any], facts: Callable[[list[dict[str, Any]]], dict[str, Any]]
) -> dict[str, Any]:
    """Build TRL's trainer, train, export ``run_dir/model``; returns the summary.

    ``data``: numbers of rows for the summary. ``facts`` converts TRL's log history to the summary's results, after the
    trainer's memory is freed. Raises ConfigError when no row is left to train on. An error is written to the summary,
    then raised.
    """
    marker = read_marker(job.resume) if job.resume is not None else None
    if is_main():
        if marker is None:
            refuse_used_folder(job.run_dir)
        with writing_to(job.run_dir):
            (job.run_dir / FOLDER).mkdir(parents=True, exist_ok=True)
    try:
        with redirect_stdout(sys.stderr):  # TRL's libraries print while they load
            trainer = build()
        _check_trainer(job, trainer)
    except BaseException:
        for folder in (job.run_dir / FOLDER, job.run_dir):
            with suppress(OSError):  # a resumed run's are not empty
                folder.rmdir()
        raise
    record = StageRecord(job.config, job.run_dir, job.stage, marker)
    for note in job.notes:
        record.message(note)
    summary: dict[str, Any] = {"model": job.config.model.path, "data": {"path": job.settings.path, **data}}
    try:
        if _train(job, record, trainer):
            export(job, trainer)
            history = trainer.state.log_history
            del trainer
            summary |= {"model_dir": str(job.run_dir / MODEL_FOLDER), **facts(history)}
        else:
            record.exit_reason = "interrupted"
    except KeyboardInterrupt:
        record.exit_reason = "interrupted"
        raise
    except BaseException as error:
        record.exit_reason = f"failed: {type(error).__name__}: {error}"
        raise
    finally:
        summary = record.finish(summary)
    return summary


def _check_trainer(job: Job, trainer: Any) -> None:
    check(
        len(trainer.train_dataset),
        f"{job.key}.path={job.settings.path} has no row that leaves anything to train on within "
        f"{job.key}.max_length={job.settings.max_length} tokens (the model's context allows {job.max_length}).",
    )
    check(
        not job.config.model.lora.r or not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled),
        f"model.lora.r={job.config.model.lora.r} does not work with FSDP or DeepSpeed here: the adapter is merged into "
        "whole weights at the end.",
    )
    # TRL cannot evaluate without rows, and all held-out ones may be too long.
    if trainer.eval_dataset is not None and not len(trainer.eval_dataset):
        trainer.eval_dataset = None
        trainer.args.eval_on_start = False
        trainer.args.eval_strategy = "no"


def _train(job: Job, record: StageRecord, trainer: Any) -> bool:
    """Train; returns whether training reached its end."""
    trainer.remove_callback(PrinterCallback)  # it prints every log a second time
    trainer.add_callback(record)
    with record.stopped_in_order():
        trainer.train(resume_from_checkpoint=str(job.resume) if job.resume is not None else None)
        if record.interrupted:
            return False
        if trainer.eval_dataset is not None:
            trainer.evaluate()  # a first Ctrl-C here has no effect: only the model remains to be written
    return True


def heldout_ends(history: list[dict[str, Any]]) -> dict[str, Any]:
    """The first and the last of TRL's own evaluations, by name without ``eval_``."""
    found = [
        {name[5:]: value for name, value in row.items() if name.startswith("eval_") and not name.endswith(LEFT_OUT)}
        for row in history
        if "eval_loss" in row
    ]
    return {"before": found[0], "after": found[-1]} if found else {}


def export(job: Job, trainer: Any) -> None:
    """``run_dir/model``: weights in ``model.dtype``, an adapter merged into them, and the tokenizer."""
    folder = job.run_dir / MODEL_FOLDER
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        trainer.save_model(str(folder))  # all ranks take part
    elif is_main():
        model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
        model = model.merge_and_unload() if job.config.model.lora.r else model
        model.to(getattr(torch, job.config.model.dtype)).save_pretrained(folder)
    if is_main():
        job.tokenizer.save_pretrained(folder)
