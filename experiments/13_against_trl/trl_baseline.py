"""TRL's `GRPOTrainer` on our tiny model and task, as a process of its own: prints samples, seconds and rewards as JSON.

The benchmark `asyncrlhf bench trl` runs this file beside our own trainer. Everything that could tilt the comparison is
an argument; what TRL does by default and does not need here (logging, evaluation, saving, mixed precision) is off.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scores import SCORES, load_tokenizer, prompt_rows


@dataclass(frozen=True)
class Settings:
    """One run. ``batch_size`` counts rollouts a step; ``fixed_length``: no response may end before its limit; ``save``:
    a folder for the trained policy, so that the benchmark scores both sides' policies by one evaluator.
    """

    model: str
    steps: int = 20
    warmup_steps: int = 3
    batch_size: int = 64
    num_generations: int = 8
    max_completion_length: int = 16
    fixed_length: bool = False
    learning_rate: float = 3e-4
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    max_grad_norm: float = 1.0
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    loss_type: str = "dapo"  # TRL's name for the mean over the step's tokens, our aggregate=token
    scale_rewards: str = "group"  # (reward - mean) / std of the group, our advantage=group_norm
    seed: int = 0
    threads: int = 2
    digits: int = 2
    score: str = "exact"  # one of SCORES
    bfloat16: bool = False  # TRL's own bf16
    paged: bool = False  # generation with transformers' continuous batching
    save: str = ""


def main(arguments: list[str] | None = None) -> int:
    settings, output = parse(arguments)
    # TRL and transformers print tables and progress to stdout; the JSON line must stand alone there.
    real_stdout = os.dup(1)
    os.dup2(2, 1)
    result = json.dumps(run(settings))
    if output is not None:
        output.write_text(result + "\n")
    with os.fdopen(real_stdout, "w") as stdout:
        stdout.write(result + "\n")
    return 0


def parse(arguments: list[str] | None) -> tuple[Settings, Path | None]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, kind in Settings.__annotations__.items():
        flag = f"--{name.replace('_', '-')}"
        default = getattr(Settings, name, None)
        if kind == "bool":
            parser.add_argument(flag, action="store_true")
        else:
            types: dict[str, type] = {"int": int, "float": float, "str": str}
            parser.add_argument(flag, type=types[kind], default=default, required=default is None)
    parser.add_argument("--output", type=Path, default=None)
    values = vars(parser.parse_args(arguments))
    output = values.pop("output")
    settings = Settings(**values)
    if not 1 <= settings.warmup_steps < settings.steps:
        parser.error(
            f"--warmup-steps={settings.warmup_steps} must be at least 1 and less than --steps={settings.steps}."
        )
    if settings.batch_size % settings.num_generations:
        parser.error(f"--batch-size={settings.batch_size} must be a multiple of --num-generations.")
    return settings, output


def run(settings: Settings) -> dict[str, Any]:
    """Train; ``samples`` and ``seconds`` cover the steps after the warm-up, ``rewards`` every step's mean.

    Seconds run from the end of the last warm-up step to the end of the last step: generation, scoring and the update,
    without set-up. With one thread more or less than asked for, the comparison would be void, so threads are set here.
    """
    os.environ.update({"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "OMP_NUM_THREADS": str(settings.threads)})
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(settings.threads)
    model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
    rewards: list[float] = []
    ends: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(settings, model, folder, rewards, ends)
        trainer.train()
    if settings.save:
        model.save_pretrained(settings.save)
        load_tokenizer(settings.model).save_pretrained(settings.save)
    seconds = ends[-1] - ends[settings.warmup_steps - 1]
    samples = (settings.steps - settings.warmup_steps) * settings.batch_size
    return {
        "samples": samples,
        "seconds": seconds,
        "samples_per_second": samples / seconds,
        "rewards": rewards,
        "settings": asdict(settings),
    }


def build_trainer(settings: Settings, model: Any, folder: str, rewards: list[float], ends: list[float]) -> Any:
    """A GRPOTrainer that appends each step's mean reward to ``rewards`` and its end's clock to ``ends``."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

    def reward(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
        scores = SCORES[settings.score](completions, answer)
        rewards.append(sum(scores) / len(scores))
        return scores

    tokenizer = load_tokenizer(settings.model)
    groups = settings.batch_size // settings.num_generations
    rows = prompt_rows(settings.model, settings.steps * groups, settings.seed, settings.digits)
    length = settings.max_completion_length
    config = GRPOConfig(
        output_dir=folder,
        max_steps=settings.steps,
        per_device_train_batch_size=settings.batch_size,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_generations=settings.num_generations,
        num_iterations=1,
        max_completion_length=length,
        generation_kwargs={"min_new_tokens": length} if settings.fixed_length else None,
        temperature=1.0,
        beta=0.0,
        epsilon=settings.epsilon,
        epsilon_high=settings.epsilon_high,
        loss_type=settings.loss_type,
        scale_rewards=settings.scale_rewards,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="constant",
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        weight_decay=0.0,
        max_grad_norm=settings.max_grad_norm,
        seed=settings.seed,
        shuffle_dataset=False,
        bf16=settings.bfloat16,
        use_transformers_continuous_batching=settings.paged,
        use_cpu=True,
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    return GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )


if __name__ == "__main__":
    sys.exit(main())
