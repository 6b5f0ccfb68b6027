"""``asyncrlhf evaluate``: held-out reward of a model or of a run's checkpoint, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from asyncrlhf.errors import ConfigError
from asyncrlhf.orchestrator.compose import check_words, load_config
from asyncrlhf.orchestrator.config import RunConfig, from_hydra
from asyncrlhf.orchestrator.records import CONFIG_FILE
from asyncrlhf.types import Generation, GenerationRequest, Prompt, RewardResult, Rollout

SAMPLES_SHOWN = 5
USAGE = """asyncrlhf evaluate [overrides]: greedy answers to the held-out prompts, as a table and one line of JSON

  asyncrlhf evaluate model.path=FOLDER task=prompts task.path=FILE    the overrides of train
  asyncrlhf evaluate run=RUN [key=value]                              a run's newest checkpoint, with its settings
  run_dir=FOLDER                                                      also write FOLDER/evaluation.json"""


def main(arguments: Sequence[str]) -> int:
    """Reads the same overrides as ``train``. ``run=RUN`` takes the settings of that run and its newest checkpoint; what
    follows are then plain settings, not names of groups. ``run_dir=FOLDER`` also writes ``FOLDER/evaluation.json``."""
    if any(argument in ("-h", "--help") for argument in arguments):
        print(USAGE)
        return 0
    named = [argument.removeprefix("run=") for argument in arguments if argument.startswith("run=")]
    rest = [argument for argument in arguments if not argument.startswith("run=")]
    config = config_of_run(Path(named[-1]), rest) if named else load_config(rest)
    folder = Path(config.run_dir) if config.run_dir else None
    result = evaluate(config)
    _show(result)
    print(json.dumps({key: value for key, value in result.items() if key != "samples"}))
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "evaluation.json").write_text(json.dumps(result, indent=2) + "\n")
    return 0


def config_of_run(run: Path, overrides: Sequence[str]) -> RunConfig:
    """The run's own config with its newest checkpoint as the model; raises ConfigError where it has none."""
    from asyncrlhf.orchestrator.checkpoint import LEARNER_FOLDER, list_checkpoints

    check_words(overrides)
    if not (run / CONFIG_FILE).is_file():
        raise ConfigError(f"run={run} holds no {CONFIG_FILE}; give the directory of a run.")
    found = list_checkpoints(run)
    if not found:
        raise ConfigError(f"run={run} holds no checkpoint; train with checkpoint.every=N to have some.")
    saved = yaml.safe_load((run / CONFIG_FILE).read_text())
    groups = [override for override in overrides if isinstance(saved.get(override.split("=")[0]), dict)]
    if groups:
        key = groups[0].split("=")[0]
        raise ConfigError(f"{groups[0]} names a group, and run={run} has its own; allowed: {key}.NAME=VALUE.")
    own = {"model": {"path": str(found[-1] / LEARNER_FOLDER / "model")}, "run_dir": "", "checkpoint": {"resume": "no"}}
    return from_hydra(OmegaConf.merge(saved, own, OmegaConf.from_dotlist(list(overrides))))


def evaluate(config: RunConfig) -> dict[str, Any]:
    """Greedy answers to all held-out prompts: mean reward with its standard error, length, truncation, samples."""
    import torch  # here, so that a wrong setting is answered before seconds of imports

    from asyncrlhf.actors.reward import RewardSpec, build_reward
    from asyncrlhf.data.pretrained import load_model
    from asyncrlhf.engines.hf import HFEngine
    from asyncrlhf.orchestrator.run import prepare

    torch.set_num_threads(max(1, config.generator.threads))
    prepared = prepare(config)
    device = "cuda" if config.generator.gpus > 0 else "cpu"
    engine = HFEngine(load_model(config.model, device), slots=config.generator.slots)
    prompts = prepared.task.heldout()
    sampling = replace(prepared.sampling, temperature=0.0, top_p=1.0, top_k=0)
    engine.submit([GenerationRequest(i, i, p.token_ids, 0, sampling) for i, p in enumerate(prompts)])
    answers: dict[int, Generation] = {}
    failed = 0
    while engine.in_flight():
        for result in engine.step(0.0).finished:
            if isinstance(result, Generation):
                answers[result.rollout_id] = result
            else:
                failed += 1
    rollouts = [_rollout(prompts[i], answers[i], prepared.tokenizer) for i in sorted(answers)]
    spec = RewardSpec(config.reward, config.task, config.model, config.generator.max_completion_length)
    return _summarise(config, rollouts, build_reward(spec).score(rollouts), failed)


def _rollout(prompt: Prompt, answer: Generation, tokenizer: Any) -> Rollout:
    return Rollout(
        answer.rollout_id,
        answer.rollout_id,
        prompt,
        answer.response_ids,
        answer.behavior_logprobs,
        answer.policy_versions,
        answer.finish_reason,
        tokenizer.decode(answer.response_ids.tolist(), skip_special_tokens=True),
        "evaluate",
    )


def _summarise(config: RunConfig, rollouts: list[Rollout], results: list[RewardResult], failed: int) -> dict[str, Any]:
    scored = [(r, s.reward) for r, s in zip(rollouts, results, strict=True) if s.reward is not None]
    rewards = np.array([reward for _, reward in scored])
    error = float(rewards.std(ddof=1) / np.sqrt(len(rewards))) if len(rewards) > 1 else None
    return {
        "model": config.model.path,
        "task": config.task.kind,
        "prompts": len(rollouts) + failed,
        "failed": failed + len(rollouts) - len(scored),
        "reward_mean": float(rewards.mean()) if len(rewards) else None,
        "reward_standard_error": error,
        "response_length_mean": float(np.mean([len(r.response_ids) for r in rollouts])) if rollouts else None,
        "truncation_rate": float(np.mean([r.finish_reason == "length" for r in rollouts])) if rollouts else None,
        "samples": [
            {"prompt": r.prompt.text, "response": r.response_text, "answer": r.prompt.answer, "reward": reward}
            for r, reward in scored
        ],
    }


def _show(result: dict[str, Any]) -> None:
    table = Table(title=f"{result['model']} on {result['prompts']} held-out prompts of {result['task']}, greedy")
    for column in ("prompt", "response", "answer", "reward"):
        table.add_column(column)
    for sample in result["samples"][:SAMPLES_SHOWN]:
        table.add_row(sample["prompt"], sample["response"], str(sample["answer"]), f"{sample['reward']:.3f}")
    Console().print(table)
