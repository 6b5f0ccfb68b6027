"""What `sft` and `reward-model` share: TRL's arguments, records, checkpoints, interruption, the exported model."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, PrinterCallback, TrainerCallback
from transformers.utils import logging as transformers_logging

from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.config.stage_config import TrainerConfig
from asyncrlhf.data.pretrained import check_model, context_length, load_tokenizer, resolve
from asyncrlhf.errors import ConfigError
from asyncrlhf.orchestrator.run import RUNS
from asyncrlhf.records.checkpoint import FOLDER, find_checkpoint
from asyncrlhf.records.recorder import RecordMarker
from asyncrlhf.stages.stage_record import MODEL_FOLDER, StageRecord, is_main, run_folder
from asyncrlhf.validation import check

MARKER_FILE = "records.json"
# Of TRL's logs, what says nothing of the model: how long the library's own evaluation took, and totals of the run.
_LEFT_OUT = ("_runtime", "_per_second", "total_flos", "train_loss", "num_tokens", "num_input_tokens_seen")


@dataclass(frozen=True)
class Job:
    """A stage that passed its checks. ``key`` is its group of settings, ``settings`` the group."""

    config: RunConfig
    settings: TrainerConfig
    key: str
    run_dir: Path
    tokenizer: PreTrainedTokenizerBase
    max_length: int  # tokens, within the model's context
    resume: Path | None


def prepare_job(config: RunConfig, settings: TrainerConfig, key: str, stage: str) -> Job:
    """Everything that can be wrong beside the data; raises ConfigError with one sentence."""
    transformers_logging.disable_progress_bar()
    found = torch.cuda.device_count()
    check(
        found <= 1 or int(os.environ.get("WORLD_SIZE", "1")) > 1,
        f"{found} GPUs are visible to one process, which trains on one; start it by accelerate launch "
        f"-m asyncrlhf {stage}, or make one visible by CUDA_VISIBLE_DEVICES.",
    )
    check(
        settings.mixed_precision != "float16" or found,
        f"{key}.mixed_precision=float16 needs a GPU; allowed here: none, bfloat16.",
    )
    check_model(config.model)
    given = Path(config.run_dir) if config.run_dir else None
    resume = find_checkpoint(config.checkpoint.resume, given, RUNS / f"{config.name}-{stage}", MARKER_FILE, stage)
    folder = resume.parents[1] if resume is not None and not config.run_dir else run_folder(config, stage)
    limit = min(settings.max_length, context_length(config.model))
    return Job(config, settings, key, folder, load_tokenizer(config.model), limit, resume)


def trainer_arguments(job: Job, heldout: bool) -> dict[str, Any]:
    """The keywords of TRL's ``SFTConfig`` and ``RewardConfig`` that both take."""
    settings, config = job.settings, job.config
    every, between = config.checkpoint.every, config.eval_every
    return {
        "output_dir": str(job.run_dir / FOLDER),
        "seed": config.seed,
        "num_train_epochs": settings.num_train_epochs,
        "max_steps": settings.max_steps,
        "learning_rate": settings.learning_rate,
        "lr_scheduler_type": settings.lr_scheduler_type,
        "warmup_steps": settings.warmup_steps,
        "weight_decay": settings.weight_decay,
        "max_grad_norm": settings.max_grad_norm,
        "per_device_train_batch_size": settings.per_device_train_batch_size,
        "per_device_eval_batch_size": settings.per_device_train_batch_size,
        "gradient_accumulation_steps": settings.gradient_accumulation_steps,
        "gradient_checkpointing": settings.gradient_checkpointing,
        "max_length": job.max_length,
        "use_cpu": not torch.cuda.is_available(),  # or transformers refuses bfloat16 there
        "bf16": settings.mixed_precision == "bfloat16",
        "fp16": settings.mixed_precision == "float16",
        "logging_steps": settings.logging_steps,
        "eval_on_start": heldout and job.resume is None,
        "eval_strategy": "steps" if heldout and between else "no",
        "eval_steps": between or None,
        "save_strategy": "steps" if every else "no",
        "save_steps": every or 500,  # read with save_strategy alone
        "save_total_limit": config.checkpoint.keep,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": torch.cuda.is_available(),
        # Optimizers hold float32 master weights; autocast is mixed_precision's business.
        "model_init_kwargs": {"dtype": "float32", "trust_remote_code": config.model.trust_remote_code},
    }


def adapter_settings(job: Job, task_type: str, saved: list[str] | None) -> Any:
    """PEFT's settings of ``model.lora``, or None for all weights; modules in ``saved`` are trained as a whole."""
    lora = job.config.model.lora
    if not lora.r:
        return None
    from peft import LoraConfig  # check_model has found it

    return LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        target_modules=list(lora.target_modules) or "all-linear",
        lora_dropout=0.0,
        task_type=task_type,
        modules_to_save=saved,
    )


class QuietTrainer:
    """Beside one of TRL's trainers: nothing of a run leaves the machine unasked."""

    def _send_telemetry(self) -> None:
        return


class _Recorder(TrainerCallback):
    """Writes what TRL logs, keeps the records' marker with each checkpoint, and ends the run in order when asked."""

    def __init__(self, record: StageRecord) -> None:
        self.record = record
        self.interrupted = False

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:
        row = {
            f"heldout_{name.removeprefix('eval_')}" if name.startswith("eval_") else name: value
            for name, value in (logs or {}).items()
            if not name.endswith(_LEFT_OUT)
        }
        if set(row) - {"epoch"}:
            self.record.log({"step": state.global_step, **row}, state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.interrupted:
            control.should_training_stop = control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if is_main():
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            (folder / MARKER_FILE).write_text(json.dumps(self.record.marker()) + "\n")


def run_trainer(
    job: Job,
    stage: str,
    data: Mapping[str, int],
    build: Callable[[], Any],
    facts: Callable[[list[dict[str, Any]]], dict[str, Any]],
) -> dict[str, Any]:
    """Build TRL's trainer, train, export ``run_dir/model``; returns the summary.

    ``data``: numbers of rows for the summary. ``facts`` makes of TRL's log history what the summary says of the result;
    the trainer and its memory are gone by then. Raises ConfigError when no row is left to train on. A failure is in the
    summary, then raised.
    """
    marker = RecordMarker(**json.loads((job.resume / MARKER_FILE).read_text())) if job.resume is not None else None
    record = StageRecord(job.config, job.run_dir, stage, marker)
    try:
        with redirect_stdout(sys.stderr):  # what TRL's libraries print as they load
            trainer = build()
        _check_trainer(job, trainer)
        _without_empty_heldout(trainer)
    except BaseException:
        record.abandon()
        raise
    summary: dict[str, Any] = {"model": job.config.model.path, "data": {"path": job.settings.path, **data}}
    try:
        record.begin()
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


def _without_empty_heldout(trainer: Any) -> None:
    """TRL cannot evaluate on no row, which is what is left when every held-out one is too long."""
    if trainer.eval_dataset is not None and not len(trainer.eval_dataset):
        trainer.eval_dataset = None
        trainer.args.eval_on_start = False
        trainer.args.eval_strategy = "no"


def _train(job: Job, record: StageRecord, trainer: Any) -> bool:
    """Whether training came to its end."""
    callback = _Recorder(record)
    trainer.remove_callback(PrinterCallback)  # it prints every log a second time
    trainer.add_callback(callback)
    with _on_interrupt(callback):
        trainer.train(resume_from_checkpoint=str(job.resume) if job.resume is not None else None)
        if callback.interrupted:
            return False
        if trainer.eval_dataset is not None:
            trainer.evaluate()  # a first Ctrl-C in here costs nothing: what is left is to write the model
    return True


@contextmanager
def _on_interrupt(callback: _Recorder) -> Iterator[None]:
    """The first Ctrl-C ends the run after the step under way, with a checkpoint; a second one ends it at once."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def first(*_: Any) -> None:
        callback.interrupted = True
        restore()
        callback.record.message("Finishing the step under way and writing a checkpoint; Ctrl-C again ends at once.")

    for number in numbers:
        signal.signal(number, first)
    try:
        yield
    finally:
        restore()


def heldout_ends(history: list[dict[str, Any]]) -> dict[str, Any]:
    """The first and the last of TRL's own evaluations, by name without ``eval_``."""
    found = [
        {
            name.removeprefix("eval_"): value
            for name, value in row.items()
            if name.startswith("eval_") and not name.endswith(_LEFT_OUT)
        }
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


def model_source(job: Job) -> str:
    return resolve(job.config.model.path)


def refuse(condition: Any, job: Job, problem: str) -> None:
    """Raise ConfigError about the stage's data when ``condition`` holds."""
    if condition:
        raise ConfigError(f"{job.key}.path={job.settings.path} {problem}")


def refuse_without_template(job: Job, conversational: bool) -> None:
    """Raise ConfigError for conversations that the model's tokenizer cannot write."""
    refuse(
        conversational and not job.tokenizer.chat_template,
        job,
        f"holds conversations, but the tokenizer of model.path={job.config.model.path} has no chat template.",
    )


def interrupted_words(summary: Mapping[str, Any]) -> str:
    """What the terminal shows of a stage that did not come to its end."""
    return f"Interrupted after {summary['steps']} steps; checkpoint.resume=auto goes on."
