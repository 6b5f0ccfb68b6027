"""``asyncrlhf reward-model``: a reward model from preferences, on TRL's ``RewardTrainer``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.stages.data import Split, hold_out
from asyncrlhf.stages.preference_data import PairEncoder, about, choose_padding, read_pairs
from asyncrlhf.stages.stage_record import MODEL_FOLDER, is_main
from asyncrlhf.stages.statistics import Estimate, agreement
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

if TYPE_CHECKING:
    from datasets import Dataset

STAGE = "reward-model"
KEY = "reward_model"
SIDES = ("chosen_ids", "rejected_ids")


@dataclass(frozen=True)
class Pairs:
    """Tokenised pairs that fit, those held out with the number of their prompt, and why others were left out."""

    train: Dataset
    heldout: Dataset
    heldout_prompts: list[int]
    counts: dict[str, int]


def run_reward_model(config: RunConfig) -> dict[str, Any]:
    """Train a score on the preferences of ``reward_model.path``, starting from ``model.path``; returns the summary.

    ``run_dir/model`` is what ``reward.kind=model reward.model.path=...`` loads, and it reads there what it read here.
    ``heldout`` of the summary: :func:`~asyncrlhf.stages.statistics.agreement` of that checkpoint, as a reward worker
    loads it, with the held-out pairs. Raises ConfigError before anything is trained.
    """
    settings = config.reward_model
    table, conversational = read_pairs(settings.path, settings.split)
    job = prepare_job(config, settings, KEY, STAGE)
    refuse_without_template(job, conversational)
    choose_padding(job.tokenizer)
    split = hold_out(table, settings, KEY, lambda name: read_pairs(settings.path, name)[0], about)
    pairs = tokenise(job, split)

    def facts(history: list[dict[str, Any]]) -> dict[str, Any]:
        return {"trainer_heldout": heldout_ends(history), "heldout": measure(job, pairs)}

    return run_trainer(job, STAGE, pairs.counts, lambda: build_trainer(job, pairs), facts)


def tokenise(job: Job, split: Split) -> Pairs:
    """The pairs as token ids, without those that are too long or whose two answers are the same."""
    encode = PairEncoder(job.tokenizer)
    counts: dict[str, int] = {"identical": 0, "too_long": 0}
    tables: list[tuple[Dataset, list[int]]] = []
    for table in (split.train, split.heldout):
        columns = [name for name in ("margin",) if name in table.column_names]
        others = [name for name in table.column_names if name not in columns]
        # `datasets` keeps results by a fingerprint that does not see a change in PairEncoder's own code.
        ids = table.map(encode, remove_columns=others, load_from_cache_file=False)
        same = [row["chosen_ids"] == row["rejected_ids"] for row in ids]
        long = [max(len(row[side]) for side in SIDES) > job.max_length for row in ids]
        kept = [i for i in range(len(ids)) if not same[i] and not long[i]]
        counts["identical"] += sum(same)
        counts["too_long"] += sum(long) - sum(a and b for a, b in zip(same, long, strict=True))
        refuse(len(ids) and all(same), job, "prefers nothing: in every row chosen and rejected are the same.")
        tables.append((ids.select(kept), kept))
    (train, _), (heldout, left) = tables
    counts |= {"train": len(train), "heldout": len(heldout)}
    return Pairs(train, heldout, [split.heldout_prompts[i] for i in left], counts)


def build_trainer(job: Job, pairs: Pairs) -> Any:
    """TRL's trainer, which loads the model and gives it a head with one label."""
    from trl import RewardConfig, RewardTrainer  # seconds of imports, which wrong input need not wait for

    class Trainer(QuietTrainer, RewardTrainer):  # type: ignore[misc]
        """TRL's, without its telemetry."""

    centre = job.config.reward_model.center_rewards_coefficient
    arguments = RewardConfig(
        **trainer_arguments(job, bool(len(pairs.heldout))), center_rewards_coefficient=centre or None
    )
    return Trainer(
        model=model_source(job),
        args=arguments,
        train_dataset=pairs.train,
        eval_dataset=pairs.heldout if len(pairs.heldout) else None,
        processing_class=job.tokenizer,
        peft_config=adapter_settings(job, "SEQ_CLS", ["score"]),  # the head is new, so that all of it trains
    )


def measure(job: Job, pairs: Pairs) -> dict[str, Any]:
    """How far the exported checkpoint agrees with the held-out pairs; empty without any. The main process alone."""
    if not len(pairs.heldout) or not is_main():
        return {}
    chosen, rejected = (
        score_ids(job.run_dir / MODEL_FOLDER, [row[side] for row in pairs.heldout], job.config) for side in SIDES
    )
    return agreement(chosen, rejected, pairs.heldout_prompts)


def score_ids(folder: Path, texts: Sequence[Sequence[int]], config: RunConfig) -> list[float]:
    """The scores of N token sequences by the checkpoint in ``folder``, loaded and run as a reward worker does."""
    import numpy as np
    import torch

    from asyncrlhf.rewards.model import load_reward_model, padded_batches, score_batch
    from asyncrlhf.rewards.reward_config import RewardModelConfig

    settings = RewardModelConfig(path=str(folder), trust_remote_code=config.model.trust_remote_code)
    model = load_reward_model(settings, "reward", "cuda" if torch.cuda.is_available() else "cpu")
    lengths = np.array([len(text) for text in texts], dtype=np.int64)
    scores = np.zeros(len(texts))
    for batch in padded_batches(lengths, config.reward.max_batch_tokens):
        rows = [torch.tensor(texts[i]) for i in batch]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        scores[batch] = score_batch(model, ids.to(model.device), mask.to(model.device)).cpu().numpy()
    return [float(score) for score in scores]


def plain_words(summary: Mapping[str, Any]) -> str:
    """What came of it, for a terminal."""
    if summary["exit_reason"] != "done":
        return interrupted_words(summary)
    data, found = summary["data"], summary["heldout"]
    left = ", ".join(f"{data[name]} {name.replace('_', ' ')}" for name in ("identical", "too_long") if data[name])
    lines = [f"Done: {summary['steps']} steps on {data['train']} pairs{f' ({left} left out)' if left else ''}."]
    if found:
        accuracy = Estimate(found["accuracy"], found["accuracy_standard_error"], found["pairs"])
        lines.append(
            f"Held-out accuracy {accuracy.text()} on {accuracy.n} pairs, mean margin {found['margin_mean']:.3f}."
        )
        lines += [
            f"  margin {row['margin_low']:.2f} to {row['margin_high']:.2f}: right {row['accuracy']:.2f}, "
            f"expected {row['expected']:.2f} ({row['pairs']} pairs)"
            for row in found["calibration"]
        ]
    lines.append(f"The model is in {summary['model_dir']}: reward.kind=model reward.model.path={summary['model_dir']}.")
    return "\n".join(lines)
