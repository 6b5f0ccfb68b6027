"""``asyncrlhf profile``: the costs of a run's parts on this machine, measured or from a run's records; their file."""

from __future__ import annotations

import asyncio
import json
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncrlhf.cli.simulate import Parser, fitted_costs
from asyncrlhf.config.compose import load_config
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.errors import ConfigError
from asyncrlhf.planner.shapes import Workload
from asyncrlhf.planner.tables import Fitted
from asyncrlhf.validation import check, typed_path

# Settings irrelevant to the measurement: no display, audit or evaluation; the schedule's rates do not matter.
QUIET = ("logging=quiet", "logging.wandb=disabled", "eval_every=0", "checkpoint.every=0", "checkpoint.at_end=false",
         "weights.audit_every=0", "task.heldout_size=8", "generator.virtual_step_seconds=0",
         "learner.virtual_step_seconds=0")  # fmt: skip


def profile(arguments: Sequence[str]) -> int:
    parser = Parser(prog="asyncrlhf profile", description="Measures the costs of this machine and model.")
    parser.add_argument(
        "--from", dest="run", type=typed_path, default=None, metavar="RUN", help="take the costs from a run's records"
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="time limit of the measurements, without start-up")
    parser.add_argument(
        "--out", type=typed_path, default=None, help="file to write (profile.json, of a run RUN/profile.json)"
    )
    options, overrides = parser.parse_known_args(list(arguments))
    if options.run is not None:
        more: dict[str, Any] = {}
        check(not overrides, f"profile --from takes no overrides such as {' '.join(overrides)}.")
        costs, made = fitted_costs(options.run)
        target = options.out or options.run / "profile.json"
    else:
        check(options.seconds > 0, f"profile: --seconds {options.seconds:g} is too small; allowed: above 0.")
        target = options.out or Path("profile.json")
        costs, made, more = _measured(options, overrides)
    costs.save(target, made, **more)
    base, each, token = costs.decode_terms
    print(
        f"An iteration of a replica takes {1e3 * base:.2f} ms, {1e3 * each:.4f} ms a sequence in it and "
        f"{1e9 * token:.3g} ms a million tokens of context."
    )
    print(f"A learner step takes {costs.train_terms[0]:.4f} s and {1e6 * costs.train_terms[1]:.2f} s a million tokens.")
    print(f"Publishing takes {1e3 * (costs.snapshot + costs.transfer + costs.load):.1f} ms.")
    print(f"Profile: {target}")
    return 0


def _measured(options: Namespace, overrides: Sequence[str]) -> tuple[Fitted, dict[str, Any], dict[str, Any]]:
    """The costs, the conditions of the measurement, and the tables."""
    from asyncrlhf.bench.profile import measure, say
    from asyncrlhf.cluster.parts import build_runtime
    from asyncrlhf.orchestrator.run import prepare

    config = load_config([*overrides, *QUIET])
    check(
        config.generator.engine != "fake",
        "generator.engine=fake computes nothing, so there is nothing to measure; allowed: hf, vllm.",
    )
    if config.generator.vllm.workers > 1:  # its workers would receive weights themselves, which needs a run's publisher
        config = replace(config, weights=config.weights.beside_the_policy(config.runtime))

    async def main() -> Any:
        prepared = prepare(config)
        runtime = build_runtime(config)
        try:
            return await measure(prepared.config, prepared, runtime, options.seconds, together=config.runtime == "ray")
        finally:
            say("end of the parts")
            await runtime.close()

    found = asyncio.run(main())
    for name, off in found.misfit.items():
        if off > 0.15:
            say(f"{name}: the linear fit deviates by up to {off:.0%} from the measured medians (tables.{name}).")
    return found.costs, facts_of(config, overrides), found.facts()


def facts_of(config: RunConfig, overrides: Sequence[str]) -> dict[str, Any]:
    """The conditions of the measurement."""
    import platform

    import torch

    from asyncrlhf.records.summary import git_state

    on_gpu = max(config.generator.gpus, config.learner.gpus) > 0 and torch.cuda.is_available()
    return {
        "git": git_state(Path(__file__).resolve().parent),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": torch.cuda.get_device_name(0) if on_gpu else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "model": config.model.path,
        "dtype": {"generators": config.model.dtype, "learner": config.learner.mixed_precision},
        "threads": {"generators": config.generator.threads, "learner": config.learner.threads},
        "replicas": config.generator.replicas,
        "slots": config.generator.slots,
        "ranks": config.learner.ranks,
        "batch_size": config.batch_size,
        "overrides": list(overrides),
    }


def read_profile(path: Path, config: RunConfig) -> tuple[Fitted, Workload | None, tuple[float, float]]:
    """Costs, lengths and interference of a profile's file; for a run's costs, which include interference, (costs, None,
    (1, 1)). A step's tokens are divided among ``config.learner.ranks``.

    Raises ConfigError for a file that is not a profile, or a profile of another model than ``config``'s.
    """
    try:
        costs = Fitted.read(path)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    given = json.loads(path.read_text(encoding="utf-8"))
    made, base = given["made"], costs.train_terms
    model = made.get("model", config.model.path)
    check(
        model == config.model.path,
        f"{path} was measured with model.path={model} and not with {config.model.path}; allowed: the same model, or a "
        "profile of this one.",
    )
    costs = replace(
        costs, train_terms=(base[0], base[1] * made.get("ranks", config.learner.ranks) / config.learner.ranks)
    )
    if "lengths" not in given:
        return costs, None, (1.0, 1.0)
    lengths = Workload.from_lengths(given["lengths"]["prompt"], given["lengths"]["responses"])
    return costs, lengths, (given["interference"]["learner"], given["interference"]["generator"])
