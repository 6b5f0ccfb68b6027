"""Our loop against TRL's ``GRPOTrainer``: the same model, prompts, group size, lengths, optimizer and cores."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

from asyncrlhf.bench.measure import QUIET, show, spread, tell, write
from asyncrlhf.config.compose import load_config
from asyncrlhf.errors import AsyncRLHFError
from asyncrlhf.models.checkpoint_folder import resolve
from asyncrlhf.orchestrator.run import train
from asyncrlhf.records.write.recorder import read_metrics
from asyncrlhf.report.frames import Run
from asyncrlhf.stages.evaluation import evaluate

from .endless import endless_checkpoint

overlap = importlib.import_module("experiments.12_overlap.bench")
HERE = Path(__file__).parent
REWARDS = {"exact": None, "prefix": "prefix_match", "digits": "digits"}  # a function of scores.py, or the task's rule


def run(arguments: Sequence[str]) -> dict[str, Any]:
    """Rounds of TRL, ours, and ours one side at a time, each with a seed of its own. Rates leave out set-up and warm-up
    on both sides, and on ours the last steps too, whose batches lie ready. Rewards compare the last quarter of the
    steps, at equal samples: ours are of policies up to ``max_staleness`` steps older. ``--heldout`` compares the last
    policies. The limit of ours is the slower of generators and learner, each alone.
    """
    parser = argparse.ArgumentParser(prog="asyncrlhf bench trl", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0, help="of the first round; each later one has the next")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fixed-length", action="store_true", help="every response has max_completion_length tokens")
    parser.add_argument("--warm-up", type=int, default=overlap.WARM_UP, help="steps left out at the head of each side")
    parser.add_argument("--paged", action="store_true", help="TRL generates with transformers' continuous batching")
    parser.add_argument("--threads", type=int, default=2, help="threads of TRL; ours has one a side")
    parser.add_argument("--trl-minutes", type=float, default=60.0, help="after which a round of TRL counts as stuck")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--score", choices=REWARDS, help="by default exact, and prefix with --fixed-length")
    parser.add_argument(
        "--trl-float32", action="store_true", help="TRL computes in float32 beside mixed precision of ours"
    )
    parser.add_argument(
        "--heldout",
        type=int,
        default=0,
        help="held-out prompts on which one evaluator scores both sides' last policies",
    )
    options, overrides = parser.parse_known_args(list(arguments))
    if options.repeats < 1:
        parser.error(f"--repeats {options.repeats} is too small; at least 1")
    options.score = options.score or ("prefix" if options.fixed_length else "exact")
    rounds: list[dict[str, Any]] = []
    for number, seed in enumerate(range(options.first_seed, options.first_seed + options.repeats), 1):
        # TRL's side records nothing, so ours writes no row a rollout.
        settings = [*QUIET, "logging.rollouts=false", f"steps={options.steps}", f"seed={seed}", *overrides]
        if (function := REWARDS[options.score]) is not None:
            settings += ["reward.kind=python", f"reward.target=experiments.13_against_trl.scores:{function}"]
        tell(number, options.repeats, "TRL, then asyncrlhf, then its sides alone")
        with tempfile.TemporaryDirectory() as folder:
            if options.fixed_length:
                source = Path(resolve(load_config(settings).model.path))
                model = endless_checkpoint(source, Path(folder) / "model")
                settings += ["generator.ignore_eos=true", f"model.path={model}"]
            theirs = trl_round(settings, options, Path(folder) / "trl")
            ours = our_round(settings, options, Path(folder) / "run")
            config = load_config(settings)
            sides = [rate * config.batch_size for rate in asyncio.run(overlap.alone(config, options.warm_up))]
        limit = dict(zip(("generators_alone", "learner_alone"), sides, strict=True))
        rounds.append({"seed": seed, "trl": theirs, "asyncrlhf": ours | limit})
        print(
            f"seed {seed}: TRL {theirs['samples_per_second']:.3g} samples/s, reward {theirs['reward']:.3f}; "
            f"asyncrlhf {ours['samples_per_second']:.3g} samples/s, reward {ours['reward']:.3f}; "
            f"generators alone {sides[0]:.3g}, learner alone {sides[1]:.3g}"
        )
        result = summary(rounds) | {"overrides": overrides, "fixed_length": options.fixed_length}
        # After each round: a series may take hours, and an interruption leaves what was measured.
        write(result, options.out)
    show("Trained samples a second", result["samples_per_second"], "samples/s")
    show("Ratios, each of one round", result["ratios"], "")
    show("Mean reward of the last quarter of the steps", result["rewards"], "")
    if options.heldout:
        show("Mean reward of the last policy's samples for held-out prompts", result["heldout"], "")
    return result


def summary(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of these rounds with their spread: samples per second, ratios of them, and mean rewards."""

    def figures(name: str) -> dict[str, list[float]]:
        return {side: [r[side][name] for r in rounds] for side in ("trl", "asyncrlhf")}

    speeds = figures("samples_per_second")
    limits = [min(r["asyncrlhf"]["generators_alone"], r["asyncrlhf"]["learner_alone"]) for r in rounds]
    bases = {"asyncrlhf / TRL": speeds["trl"], "asyncrlhf / its limit": limits}
    ratios = {
        name: spread([ours / base for ours, base in zip(speeds["asyncrlhf"], bases[name], strict=True)])
        for name in bases
    }
    scores = {"rewards": figures("reward")}
    if "heldout" in rounds[0]["trl"]:
        scores["heldout"] = figures("heldout")
    return {
        "rounds": list(rounds),
        "samples_per_second": {
            side: spread(found) for side, found in (speeds | {"limit of asyncrlhf": limits}).items()
        },
        "ratios": ratios,
        **{name: {side: spread(found) for side, found in sides.items()} for name, sides in scores.items()},
    }


def last_quarter(rewards: Sequence[float]) -> float:
    return fmean(rewards[-max(1, len(rewards) // 4) :])


def policy_reward(model: Path, settings: Sequence[str], prompts: int) -> dict[str, float]:
    """The mean reward of four samples for each of so many held-out prompts; {} for none."""
    if not prompts:
        return {}
    sampled = ["evaluation.temperature=1", "evaluation.num_generations=4", f"task.heldout_size={prompts}"]
    config = load_config([*settings, *sampled, f"model.path={model}"])
    with ProcessPoolExecutor(1, get_context("spawn")) as apart:  # vLLM sets what later rounds would inherit
        return {"heldout": apart.submit(evaluate, config).result()["reward_mean"]}


def our_round(settings: Sequence[str], options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    config = load_config([f"run_dir={folder}", *settings, f"checkpoint.at_end={options.heldout > 0}"])
    train(config)
    rows = read_metrics(folder / "metrics.jsonl")
    first, last = rows[options.warm_up - 1], rows[-2 - config.async_.bound]
    seconds = last["wall_time"] - first["wall_time"]
    rewards = [row["reward_mean"] for row in rows]
    return {
        "samples_per_second": (last["step"] - first["step"]) * config.batch_size / seconds,
        "reward": last_quarter(rewards),
        "rewards": rewards,
        **policy_reward(Run(folder).model if options.heldout else folder, settings, options.heldout),
    }


def trl_round(settings: Sequence[str], options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    config = load_config(list(settings))
    command = [
        *(sys.executable, str(HERE / "trl_baseline.py")),
        *("--model", resolve(config.model.path), "--steps", str(config.steps), "--warmup-steps", str(options.warm_up)),
        *("--batch-size", str(config.batch_size), "--num-generations", str(config.num_generations)),
        *("--max-completion-length", str(config.generator.max_completion_length)),
        *("--learning-rate", str(config.learner.learning_rate)),
        *("--adam-beta1", str(config.learner.adam_beta1), "--adam-beta2", str(config.learner.adam_beta2)),
        *("--max-grad-norm", str(config.learner.max_grad_norm), "--epsilon", str(config.algorithm.epsilon)),
        *("--epsilon-high", str(config.algorithm.epsilon_high), "--seed", str(config.seed)),
        *("--threads", str(options.threads), "--digits", str(config.task.digits)),
        *("--score", options.score),
        *(["--fixed-length"] if options.fixed_length else []),
        *(["--bfloat16"] if config.learner.mixed_precision == "bfloat16" and not options.trl_float32 else []),
        *(["--paged"] if options.paged else []),
        *(["--save", str(folder)] if options.heldout else []),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60 * options.trl_minutes, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        raise AsyncRLHFError(
            f"TRL's side did not end within {options.trl_minutes:g} minutes; allow more with --trl-minutes."
        ) from None
    if done.returncode:
        raise AsyncRLHFError(f"TRL's side failed: {done.stderr.strip().splitlines()[-1]}")
    result = json.loads(done.stdout.strip().splitlines()[-1])
    told = {name: result[name] for name in ("samples_per_second", "rewards")}
    return told | {"reward": last_quarter(result["rewards"])} | policy_reward(folder, settings, options.heldout)
