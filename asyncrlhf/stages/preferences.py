"""``asyncrlhf preferences``: pairs of a model's own answers, labelled by a reward with noise, in TRL's format."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from asyncrlhf.config.conversion import to_plain
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.config.stage_config import PreferencesConfig
from asyncrlhf.data.data_config import TaskConfig
from asyncrlhf.data.sources import PromptSource
from asyncrlhf.errors import AsyncRLHFError, ConfigError
from asyncrlhf.orchestrator.run import prepare
from asyncrlhf.records.write.recorder import CONFIG_FILE, SUMMARY_FILE
from asyncrlhf.records.write.whole_files import write_atomically, writing_to
from asyncrlhf.stages.answers import sample_answers, score
from asyncrlhf.stages.stage_record import run_folder
from asyncrlhf.types import Prompt, Rollout
from asyncrlhf.validation import check

PREFERENCES_FILE = "preferences.jsonl"
LABEL_STREAM = 1  # added to the seed, so that labels and answers share no random draws
MOST_PROMPTS = 512  # without preferences.num_prompts
DRAWS_A_PROMPT = 50  # after so many repeated prompts the task has no more


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt, the preferred one first, with their rewards."""

    chosen: Rollout
    rejected: Rollout
    gold_chosen: float
    gold_rejected: float


def run_preferences(config: RunConfig) -> dict[str, Any]:
    """Sample, score, pair and label; writes ``run_dir/preferences.jsonl`` and returns the content of
    ``run_dir/summary.json``.

    Each line: ``prompt``, ``chosen``, ``rejected`` (texts, or messages with ``task.chat_template``), and the rewards
    ``gold_chosen`` and ``gold_rejected``. Pairs of equal reward, empty answers, and answers cut off at
    ``generator.max_completion_length`` are left out: trainers add the end token to every answer, so that a reward
    model would learn from texts that it never scores later. Raises ConfigError before anything is sampled,
    AsyncRLHFError if no pair is left.
    """
    check(
        not config.episode.used, "asyncrlhf preferences pairs answers, and with episode.* a rollout has several turns."
    )
    prepared = prepare(config)
    prompts = draw_prompts(prepared.task.train_source(config.seed), config.preferences.num_prompts)
    folder = run_folder(config, "preferences")
    _claim(folder, config)
    torch.set_num_threads(max(1, config.generator.threads))
    each = config.preferences.num_generations
    rollouts = sample_answers(config, config.model, prepared.tokenizer, prompts, prepared.sampling, each)
    ended = [r for r in rollouts if r.finish_reason == "stop"]
    kept = [r for r in ended if r.response_text]
    (results,) = score(config, kept)
    scored = [(r, s.reward) for r, s in zip(kept, results, strict=True) if s.reward is not None]
    asked = len(prompts) * each
    failed = asked - len(rollouts) + len(kept) - len(scored)
    if failed > config.max_failure_fraction * asked:
        cause = next((s.error for s in results if s.error), "the engine refused them")
        raise AsyncRLHFError(f"{failed} of {asked} answers have no reward: {cause}")
    pairs, ties = make_pairs(scored, config.preferences, config.seed)
    if not pairs:
        raise AsyncRLHFError(
            f"No pair is left of {asked} answers: {len(rollouts) - len(ended)} were cut off at "
            f"generator.max_completion_length={config.generator.max_completion_length}, {len(ended) - len(kept)} were "
            f"empty, {failed} have no reward, and {ties} pairs have equal rewards."
        )
    lines = (json.dumps(_line(pair, config.task), ensure_ascii=False) + "\n" for pair in pairs)
    write_atomically(folder / PREFERENCES_FILE, "".join(lines))
    summary = {
        "run_dir": str(folder),
        "preferences": str(folder / PREFERENCES_FILE),
        "model": config.model.path,
        "seed": config.seed,
        "prompts": len(prompts),
        "answers": asked,
        "truncated_dropped": len(rollouts) - len(ended),
        "empty_dropped": len(ended) - len(kept),
        "failed": failed,
        "ties_dropped": ties,
        **describe(pairs, [reward for _, reward in scored]),
        "settings": asdict(config.preferences),
    }
    write_atomically(folder / SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")
    return summary


def draw_prompts(source: PromptSource, given: int | None) -> list[Prompt]:
    """``given`` prompts with different texts, or ConfigError for a source that has fewer. None: up to 512."""
    count = MOST_PROMPTS if given is None else given
    found: dict[str, Prompt] = {}
    repeats = 0
    while len(found) < count and repeats < DRAWS_A_PROMPT * (len(found) + 1):
        prompt = source.next()
        repeats += prompt.text in found
        found.setdefault(prompt.text, prompt)
    if len(found) < count and given is not None:
        raise ConfigError(
            f"preferences.num_prompts={count} is more than the task's training prompts; allowed: at most {len(found)}."
        )
    return list(found.values())


def make_pairs(scored: Sequence[tuple[Rollout, float]], config: PreferencesConfig, seed: int) -> tuple[list[Pair], int]:
    """Random pairs of each prompt's answers, each answer in at most one pair, and the number of ties.

    The pairs and their labels depend only on ``seed`` and the order of ``scored``.
    """
    rng = np.random.default_rng([seed, LABEL_STREAM])
    groups: dict[int, list[tuple[Rollout, float]]] = {}
    for rollout, reward in scored:
        groups.setdefault(rollout.group_id, []).append((rollout, reward))
    pairs, ties = [], 0
    for group in groups.values():
        order = rng.permutation(len(group))
        for one, other in zip(order[0::2], order[1::2], strict=False):
            (first, gold_first), (second, gold_second) = group[one], group[other]
            draw = float(rng.random())
            if gold_first == gold_second:
                ties += 1
            elif draw < prefer_probability(gold_first - gold_second, config):
                pairs.append(Pair(first, second, gold_first, gold_second))
            else:
                pairs.append(Pair(second, first, gold_second, gold_first))
    return pairs, ties


def prefer_probability(margin: float, config: PreferencesConfig) -> float:
    """The probability of choosing an answer over one with ``margin`` less reward; ``margin`` is not 0."""
    if config.noise == "bradley_terry":
        return 0.5 * (1.0 + math.tanh(margin / (2.0 * config.temperature)))  # sigmoid without overflow
    right = 1.0 - config.flip_probability
    return right if margin > 0 else 1.0 - right


def describe(pairs: Sequence[Pair], rewards: Sequence[float]) -> dict[str, float | int]:
    """Statistics of the labels: ``agreement``, the fraction of pairs whose chosen answer has more reward;
    ``margin_mean``, the mean absolute difference; the rewards of both sides, and of all answers that ended."""
    margins = np.array([pair.gold_chosen - pair.gold_rejected for pair in pairs])
    return {
        "pairs": len(pairs),
        "agreement": float(np.mean(margins > 0)),
        "margin_mean": float(np.abs(margins).mean()),
        "reward_chosen_mean": float(np.mean([pair.gold_chosen for pair in pairs])),
        "reward_rejected_mean": float(np.mean([pair.gold_rejected for pair in pairs])),
        "reward_mean": float(np.mean(rewards)),
        "reward_std": float(np.std(rewards)),
    }


def _line(pair: Pair, task: TaskConfig) -> dict[str, Any]:
    # The prompt as the policy saw it: a reward model must train on the texts that it will score.
    prompt: Any = task.prompt_template.replace("{prompt}", pair.chosen.prompt.text)
    chosen: Any = pair.chosen.response_text
    rejected: Any = pair.rejected.response_text
    if task.chat_template:
        system = [{"role": "system", "content": task.system_prompt}] if task.system_prompt else []
        prompt = [*system, {"role": "user", "content": prompt}]
        chosen, rejected = ([{"role": "assistant", "content": text}] for text in (chosen, rejected))
    golds = {"gold_chosen": pair.gold_chosen, "gold_rejected": pair.gold_rejected}
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **golds}


def _claim(folder: Path, config: RunConfig) -> None:
    """Create the run's folder and write its config; raises ConfigError if it is in use or cannot be written."""
    if (folder / PREFERENCES_FILE).exists():
        raise ConfigError(f"run_dir={folder} already holds {PREFERENCES_FILE}; give another run_dir.")
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / CONFIG_FILE, yaml.safe_dump(to_plain(config), sort_keys=False, allow_unicode=True))
