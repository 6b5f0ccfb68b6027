"""``asyncrlhf reward-model``: a reward model from preferences, on TRL's ``RewardTrainer``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.records.show.summary import counted
from asyncrlhf.rewards.model import load_reward_model, padded, padded_batches, score_batch
from asyncrlhf.rewards.reward_config import RewardModelConfig
from asyncrlhf.stages.data import Split, hold_out
from asyncrlhf.stages.preference_data import PairEncoder, about, choose_padding, read_pairs
from asyncrlhf.stages.stage_record import MODEL_FOLDER, is_main
from asyncrlhf.stages.statistics import Estimate, agreement
from asyncrlhf.stages.training import Job, build_trainer, heldout_ends, prepare_job, run_trainer
from asyncrlhf.validation import check

if TYPE_CHECKING:
    from datasets import Dataset

SIDES = ("chosen_ids", "rejected_ids")


def run_reward_model(config: RunConfig) -> dict[str, Any]:
    """Train a score on the preferences of ``reward_model.path``, starting from ``model.path``; returns the summary.

    ``reward.kind=model reward.model.path=run_dir/model`` loads the result and scores the same token ids as the
    training. ``heldout`` of the summary: :func:`~asyncrlhf.stages.statistics.agreement` of that checkpoint, loaded as a
    reward worker does, with the held-out pairs. Raises ConfigError before anything is trained.
    """
    settings = config.reward_model
    table, conversational = read_pairs(settings.path, settings.split)
    job = prepare_job(config, settings, "reward-model", conversational)
    choose_padding(job.tokenizer)
    split = hold_out(table, settings, job.key, lambda name: read_pairs(settings.path, name)[0], about)
    pairs, counts = tokenise(job, split)

    def facts(history: list[dict[str, Any]]) -> dict[str, Any]:
        return {"trainer_heldout": heldout_ends(history), "heldout": measure(job, pairs)}

    return run_trainer(job, counts, lambda: _trainer(job, pairs), facts)


def tokenise(job: Job, split: Split) -> tuple[Split, dict[str, int]]:
    """The pairs as token ids, without pairs that are too long or have equal answers, and the count of each kind."""
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
        check(
            not len(ids) or not all(same),
            f"{job.key}.path={job.settings.path} prefers nothing: in every row chosen and rejected are the same.",
        )
        tables.append((ids.select(kept), kept))
    (train, _), (heldout, left) = tables
    counts |= {"train": len(train), "heldout": len(heldout)}
    return Split(train, heldout, [split.heldout_prompts[i] for i in left]), counts


def _trainer(job: Job, pairs: Split) -> Any:
    from trl import RewardConfig, RewardTrainer  # slow imports, after the checks of the input

    # TRL adds a new head with one label; all of the model trains.
    head = {"task_type": "SEQ_CLS", "modules_to_save": ["score"]}
    return build_trainer(job, RewardTrainer, RewardConfig, pairs.train, pairs.heldout, head)


def measure(job: Job, pairs: Split) -> dict[str, Any]:
    """The agreement of the exported checkpoint with the held-out pairs; empty without any. Main process only."""
    if not len(pairs.heldout) or not is_main():
        return {}
    chosen, rejected = (
        score_ids(job.run_dir / MODEL_FOLDER, [row[side] for row in pairs.heldout], job.config) for side in SIDES
    )
    return agreement(chosen, rejected, pairs.heldout_prompts)


def score_ids(folder: Path, texts: Sequence[Sequence[int]], config: RunConfig) -> list[float]:
    """The scores of N token sequences by the checkpoint in ``folder``, loaded and run as a reward worker does."""
    settings = RewardModelConfig(path=str(folder), trust_remote_code=config.model.trust_remote_code)
    model = load_reward_model(settings, "reward", "cuda" if torch.cuda.is_available() else "cpu")
    lengths = np.array([len(text) for text in texts], dtype=np.int64)
    scores = np.zeros(len(texts))
    for batch in padded_batches(lengths, config.reward.max_batch_tokens):
        scores[batch] = score_batch(model, *padded([texts[i] for i in batch], model.device)).cpu().numpy()
    return [float(score) for score in scores]


def plain_words(summary: Mapping[str, Any]) -> str:
    """The result of a finished run, for a terminal."""
    data, found = summary["data"], summary["heldout"]
    left = ", ".join(f"{data[name]} {name.replace('_', ' ')}" for name in ("identical", "too_long") if data[name])
    lines = [
        f"Done: {summary['steps']} steps on {counted(data['train'], 'pair')}{f' ({left} left out)' if left else ''}."
    ]
    if found:
        accuracy = Estimate(found["accuracy"], found["accuracy_standard_error"], found["pairs"])
        lines.append(
            f"Held-out accuracy {accuracy.text()} on {counted(accuracy.n, 'pair')}, "
            f"mean margin {found['margin_mean']:.3g}."
        )
        lines += [
            f"  margin {row['margin_low']:.3g} to {row['margin_high']:.3g}: right {row['accuracy']:.2f}, "
            f"expected {row['expected']:.2f} ({counted(row['pairs'], 'pair')})"
            for row in found["calibration"]
        ]
    lines.append(f"The model is in {summary['model_dir']}: reward.kind=model reward.model.path={summary['model_dir']}.")
    return "\n".join(lines)
