"""What a prediction starts from: settings, costs and lengths, of a run or of a profile."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from asyncrlhf.actors.where import split_cores
from asyncrlhf.cluster.parts import placement_plan, specs
from asyncrlhf.cluster.placement import parts_of
from asyncrlhf.config.compose import check_words
from asyncrlhf.config.conversion import from_hydra
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.engines.generator_config import replica_kinds
from asyncrlhf.errors import ConfigError
from asyncrlhf.planner.shapes import Workload
from asyncrlhf.planner.tables import Fitted
from asyncrlhf.records.read.settings import recorded_settings
from asyncrlhf.records.write.recorder import METRICS_FILE
from asyncrlhf.simulator.shared_cores import Cores
from asyncrlhf.validation import check


def fitted_costs(run: Path) -> tuple[Any, dict[str, Any]]:
    """Costs of a run, and their origin. Of parts that share the cores of one machine they are CPU seconds."""
    from asyncrlhf.actors.where import available_cores
    from asyncrlhf.planner.fit import costs_of_run

    check_run(run)
    try:
        cores = cores_of(changed(settings_of_run(run, ())), available_cores())
        costs = costs_of_run(run, cpu=cores is not None, apart=cores is not None and not cores.learner)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    summary = run / "summary.json"
    known = json.loads(summary.read_text()) if summary.is_file() else {}
    return costs, {"run": str(run), **{key: known[key] for key in ("git_commit", "versions", "seed") if key in known}}


def workload_of(run: Path) -> Any:
    """The workload of a run. What it dropped in flight counts as at least as long as it had become by then."""
    from asyncrlhf.planner.fit import workload_of_run
    from asyncrlhf.records.read.cut_short import cut_lengths

    longest = changed(settings_of_run(run, ())).generator.max_completion_length
    return workload_of_run(run, cut_lengths(run), longest)


def sharing(config: RunConfig, costs: Any, cores: int) -> dict[str, Any]:
    """The :class:`Conditions` of parts that share ``cores`` of one machine, if the costs are CPU seconds."""
    from asyncrlhf.actors.generator import GeneratorActor
    from asyncrlhf.transport.build_transport import may_share_memory

    if not (costs.call or costs.message):
        return {}
    replicas = sum(kind.config.replicas for kind in replica_kinds(config.generator))
    shared = cores_of(config, range(cores))
    if shared is not None:  # half of them remain: what uses more is outside this container
        shared = replace(shared, shared=max(shared.shared / 2, shared.shared - costs.others), cold=costs.cold)
    learner, adapter = config.learner, config.model.lora.r > 0
    maps = not config.ray.cluster and may_share_memory(config.weights, sharded=learner.sharded, adapter=adapter)
    return {"cores": shared, "linger": GeneratorActor.result_seconds(replicas), "maps": maps}


def check_run(run: Path) -> None:
    if not (run / METRICS_FILE).is_file():
        raise ConfigError(f"{run} holds no {METRICS_FILE}; give the directory of a run.")
    summary = run / "summary.json"
    if summary.is_file() and json.loads(summary.read_text()).get("simulated"):
        raise ConfigError(f"{run} is a simulated run, which measured no costs; give a real run.")


def config_of_run(run: Path, overrides: Sequence[str]) -> RunConfig:
    """The run's own config, with the changes, as a simulated run."""
    from asyncrlhf.simulator.simulate import OVERRIDES

    return changed(settings_of_run(run, overrides), *OVERRIDES)


def settings_of_run(run: Path, overrides: Sequence[str]) -> DictConfig:
    """The run's settings, with the changes, for a new run without display and sinks."""
    check_words(overrides)
    saved = recorded_settings(str(run), run)
    own = {"run_dir": "", "checkpoint": {"resume": "no"}, "logging": {"progress": "none", "report": False}}
    merged = OmegaConf.merge(saved, OmegaConf.from_dotlist(list(overrides)), own)
    assert isinstance(merged, DictConfig)
    return merged


def changed(settings: DictConfig, *overrides: str) -> RunConfig:
    """The config of these settings with changes; raises ConfigError with one sentence."""
    merged = OmegaConf.merge(settings, OmegaConf.from_dotlist(list(overrides)))
    assert isinstance(merged, DictConfig)
    return from_hydra(merged)


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


def cores_of(config: RunConfig, available: Collection[int]) -> Cores | None:
    """The cores that the parts of a run under Ray share on one machine with these cores; None if GPUs, an endpoint or
    processes of vLLM do the work, whose time is not CPU time of the parts."""
    away = config.generator.engine == "vllm" or config.reward.kind in ("http", "judge", "sum")
    if config.runtime != "ray" or away or max(config.generator.gpus, config.learner.gpus) > 0:
        return None
    own, count = config.learner, len(available)
    others = sum(p.cpus for p in parts_of(specs(config, config.weights), config.cluster) if p.kind != "learner")
    apart = not placement_plan(config).sharing
    if apart and (split := split_cores(available, own.ranks, own.threads, others)) is not None:
        return Cores(len(split.others))
    return Cores(count, own.ranks * max(1, own.threads))
