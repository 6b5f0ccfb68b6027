"""``asyncrlhf evaluate``: held-out reward of a model or of a run's checkpoint, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from asyncrlhf.cli.compose import load_config
from asyncrlhf.orchestrator.config import RunConfig
from asyncrlhf.orchestrator.run import prepare
from asyncrlhf.types import Generation, GenerationRequest, Prompt, RewardResult, Rollout

SAMPLES_SHOWN = 5


def main(arguments: Sequence[str]) -> int:
    """Reads the same overrides as ``train``; ``model.path`` may be ``RUN/checkpoints/STEP/learner/model``. With
    ``run_dir=FOLDER`` the JSON is also written to ``FOLDER/evaluation.json``."""
    config = load_config(arguments)
    torch.set_num_threads(max(1, config.generator.threads))
    result = evaluate(config)
    _show(result)
    print(json.dumps({key: value for key, value in result.items() if key != "samples"}))
    if config.run_dir:
        folder = Path(config.run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "evaluation.json").write_text(json.dumps(result, indent=2) + "\n")
    return 0


def evaluate(config: RunConfig) -> dict[str, Any]:
    """Greedy answers to all held-out prompts: mean reward with its standard error, length, truncation, samples."""
    from asyncrlhf.actors.reward import RewardSpec, build_reward
    from asyncrlhf.data.pretrained import load_model
    from asyncrlhf.engines.hf import HFEngine

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


def _summarise(
    config: RunConfig, rollouts: list[Rollout], results: list[RewardResult], failed: int
) -> dict[str, Any]:
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
