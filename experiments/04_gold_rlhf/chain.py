"""One seed of the study through the command line's stages: each stage's output is the next one's input."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from asyncrlhf.config.compose import load_config
from asyncrlhf.orchestrator.run import train
from asyncrlhf.records.write.checkpoint import LEARNER_FOLDER, list_checkpoints

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DEMONSTRATIONS = "demonstrations.jsonl"


class StageFailed(Exception):
    """A stage did not end well; says which one, and its own words."""


@dataclass(frozen=True)
class Scale:
    """``tiny.yaml`` or ``smollm2.yaml``: overrides of each stage, and the grid."""

    name: str
    base: str
    gold: str  # package.module:function
    demonstrations: str  # the function of demonstrations.py that makes the data
    common: list[str]
    sft: list[str]
    preferences: list[str]
    reward_model: list[str]
    train: list[str]
    evaluate: list[str]
    algorithms: dict[str, list[str]]
    modes: dict[str, list[str]]
    chain: list[str]  # [algorithm, mode] of the one run of `chain`
    seeds: list[int]
    overoptimised: dict[str, Any]  # algorithm, train
    best_of_n_prompts: int
    clock: dict[str, list[str]]  # algorithms, train

    @classmethod
    def read(cls, name: str) -> Scale:
        return cls(name, **yaml.safe_load((HERE / f"{name}.yaml").read_text()))


@dataclass(frozen=True)
class Base:
    """What all runs of one seed start from."""

    scale: Scale
    seed: int
    folder: Path
    task: tuple[str, ...]  # overrides that name the prompts

    @property
    def sft_model(self) -> Path:
        return self.folder / "sft" / "model"

    @property
    def reward_model(self) -> Path:
        return self.folder / "reward_model" / "model"

    @property
    def common(self) -> list[str]:
        return [*self.scale.common, *self.task, f"seed={self.seed}"]

    def rewards(self, proxy: float, gold: float) -> list[str]:
        """The learned reward and the gold one, each with its weight; a weight of 0 is logged alone."""
        return [
            "reward.kind=sum",
            f"++reward.parts.proxy={{kind: model, weight: {proxy}, model: {{path: '{self.reward_model}'}}}}",
            f"++reward.parts.gold={{kind: python, weight: {gold}, target: '{self.scale.gold}'}}",
        ]

    def training(self, algorithm: str, mode: str) -> list[str]:
        """Overrides of a run that learns from the proxy alone."""
        scale = self.scale
        chosen = [*scale.algorithms[algorithm], *scale.modes[mode]]
        return [*self.common, *scale.train, *chosen, f"model.path={self.sft_model}", *self.rewards(1.0, 0.0)]


def asyncrlhf(command: str, folder: Path, overrides: Sequence[str]) -> float:
    """Run one stage in a process of its own, unless it was done before; returns its seconds. Raises StageFailed."""
    done = folder / ("evaluation.json" if command == "evaluate" else "summary.json")
    if is_done(done):
        return 0.0
    started = time.monotonic()
    arguments = [sys.executable, "-m", "asyncrlhf", command, *overrides, f"run_dir={folder}"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    ended = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True)
    if ended.returncode != 0 or not done.is_file():
        raise StageFailed(f"asyncrlhf {command} ended with {ended.returncode}: {ended.stderr.strip()[-2000:]}")
    return time.monotonic() - started


def train_here(folder: Path, overrides: Sequence[str]) -> float:
    """As ``asyncrlhf("train", ...)`` in this process, on its local runtime: many runs for one start of Python."""
    if is_done(folder / "summary.json"):
        return 0.0
    started = time.monotonic()
    torch.set_num_threads(1)
    train(load_config([*overrides, "runtime=local", f"run_dir={folder}"]))
    return time.monotonic() - started


def is_done(summary: Path) -> bool:
    """Whether the stage that writes ``summary`` came to its end; if not, its folder is emptied for another try."""
    if summary.is_file() and read_json(summary).get("exit_reason", "done") == "done":
        return True
    shutil.rmtree(summary.parent, ignore_errors=True)
    return False


def make_base(scale: Scale, seed: int, folder: Path, say: Any = print) -> Base:
    """Demonstrations, SFT, preferences by gold with noise, reward model; what is there already is kept."""
    import demonstrations

    task = getattr(demonstrations, scale.demonstrations)(folder, seed, [*scale.common, f"model.path={scale.base}"])
    base = Base(scale, seed, folder, tuple(task))
    sft = [*base.common, *scale.sft, f"model.path={scale.base}", f"sft.path={folder / DEMONSTRATIONS}"]
    say(f"sft: {asyncrlhf('sft', folder / 'sft', sft):.0f} s", flush=True)
    start = [*base.common, f"model.path={base.sft_model}"]
    gold = ["reward.kind=python", f"reward.target={scale.gold}"]
    took = asyncrlhf("preferences", folder / "preferences", [*start, *scale.preferences, *gold])
    pairs = read_json(folder / "preferences" / "summary.json")
    say(f"preferences: {took:.0f} s, {pairs['pairs']} pairs, {pairs['agreement']:.3f} agree with gold", flush=True)
    data = f"reward_model.path={folder / 'preferences' / 'preferences.jsonl'}"
    took = asyncrlhf("reward-model", folder / "reward_model", [*start, *scale.reward_model, data])
    say(f"reward model: {took:.0f} s", flush=True)
    return base


def evaluate(base: Base, model: Path, folder: Path) -> dict[str, Any]:
    """``evaluation.json`` of a model: gold is the reward, the proxy a part of weight 0, and the SFT model both the
    reference of the KL and the opponent of the win rate."""
    beside = [f"evaluation.reference={base.sft_model}", f"evaluation.against={base.sft_model}"]
    settings = [*base.scale.evaluate, *base.rewards(0.0, 1.0), *beside]
    asyncrlhf("evaluate", folder, [*base.common, f"model.path={model}", *settings])
    return read_json(folder / "evaluation.json")


def trained_model(run: Path) -> Path:
    return list_checkpoints(run)[-1] / LEARNER_FOLDER / "model"


def gold_by_prompt(evaluation: dict[str, Any]) -> dict[str, float]:
    """Mean gold reward of each prompt's samples."""
    found: dict[str, list[float]] = {}
    for sample in evaluation["samples"]:
        found.setdefault(sample["prompt"], []).append(sample["reward"])
    return {prompt: float(np.mean(rewards)) for prompt, rewards in found.items()}


def compare(before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
    """Gold reward of two evaluations on the same prompts, and their difference with its standard error over prompts."""
    one, other = gold_by_prompt(before), gold_by_prompt(after)
    differences = np.array([other[prompt] - one[prompt] for prompt in sorted(one.keys() & other.keys())])
    error = float(differences.std(ddof=1) / np.sqrt(len(differences)))
    return {
        "prompts": len(differences),
        "before": float(np.mean(list(one.values()))),
        "after": float(np.mean(list(other.values()))),
        "gain": float(differences.mean()),
        "standard_error": error,
    }


def read_json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found
