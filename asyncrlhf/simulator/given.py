"""What a prediction starts from: settings, costs and lengths, of a run or of a profile."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from asyncrlhf.actors.generator import GeneratorActor
from asyncrlhf.actors.where import available_cores, split_cores
from asyncrlhf.cluster.parts import placement_plan, specs
from asyncrlhf.cluster.placement import parts_of
from asyncrlhf.config.compose import check_words
from asyncrlhf.config.conversion import from_hydra
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.engines.generator_config import replica_kinds
from asyncrlhf.errors import ConfigError
from asyncrlhf.planner.fit import costs_of_run, hiccups_of_run, workload_of_run
from asyncrlhf.planner.shapes import Workload
from asyncrlhf.planner.tables import Fitted
from asyncrlhf.records.read.cut_short import cut_lengths
from asyncrlhf.records.read.settings import recorded_settings
from asyncrlhf.records.write.recorder import METRICS_FILE
from asyncrlhf.simulator.cost_world import Cores
from asyncrlhf.transport.build_transport import mapped_transport
from asyncrlhf.validation import check


@dataclass(frozen=True)
class Given:
    """What a run's records or a profile say.

    Args:
        costs: None without either of them.
        lengths: None if no lengths are known.
        hiccups: of the learner per hour, and the seconds of one.
        interference: factors on the seconds of (learner, generators) while the other side works too. The costs of a run
            include it.
    """

    costs: Fitted | None = None
    lengths: Workload | None = None
    hiccups: tuple[float, float] = (0.0, 0.0)
    interference: tuple[float, float] = (1.0, 1.0)


def given(run: Path | None, profile: Path | None, config: RunConfig, law: Workload | None) -> Given:
    """What is known of ``run`` or ``profile``. ``law``: the lengths in place of theirs, up to those that ``config``
    allows. Raises ConfigError with one sentence."""
    try:
        if run is not None:
            found = Given(fitted_costs(run)[0], workload_of(run), hiccups_of_run(run))
        else:
            found = read_profile(profile, config) if profile is not None else Given()
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if law is None:
        return found
    longest = config.generator.max_completion_length
    return replace(found, lengths=replace(law, mean=min(law.mean, longest), longest=longest))


def fitted_costs(run: Path) -> tuple[Fitted, dict[str, Any]]:
    """Costs of a run, and their origin. Of parts that share the cores of one machine they are CPU seconds."""
    check_run(run)
    try:
        cores = cores_of(changed(settings_of_run(run, ())), available_cores())
        costs = costs_of_run(run, cpu=cores is not None, apart=cores is not None and not cores.learner)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    summary = run / "summary.json"
    known = json.loads(summary.read_text()) if summary.is_file() else {}
    return costs, {"run": str(run), **{key: known[key] for key in ("git_commit", "versions", "seed") if key in known}}


def workload_of(run: Path) -> Workload:
    """The workload of a run. What it dropped in flight counts as at least as long as it had become by then."""
    longest = changed(settings_of_run(run, ())).generator.max_completion_length
    return workload_of_run(run, cut_lengths(run), longest)


def sharing(config: RunConfig, costs: Any, cores: int) -> dict[str, Any]:
    """The :class:`Conditions` of parts that share ``cores`` of one machine, if the costs are CPU seconds."""
    if not (costs.call or costs.message):
        return {}
    replicas = sum(kind.config.replicas for kind in replica_kinds(config.generator))
    shared = cores_of(config, range(cores))
    if shared is not None:  # half of them remain: what uses more is outside this container
        shared = replace(shared, shared=max(shared.shared / 2, shared.shared - costs.others), cold=costs.cold)
    learner, adapter = config.learner, config.model.lora.r > 0
    mapped = mapped_transport(config.weights, sharded=learner.sharded, adapter=adapter, on_cpus=True, on_card=False)
    maps = not config.ray.cluster and bool(mapped)
    return {"cores": shared, "linger": GeneratorActor.result_seconds(replicas), "maps": maps}


def check_run(run: Path) -> None:
    if not (run / METRICS_FILE).is_file():
        raise ConfigError(f"{run} holds no {METRICS_FILE}; give the directory of a run.")
    summary = run / "summary.json"
    if summary.is_file() and json.loads(summary.read_text()).get("simulated"):
        raise ConfigError(f"{run} is a simulated run, which measured no costs; give a real run.")


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


def read_profile(path: Path, config: RunConfig) -> Given:
    """The content of a profile's file; that of a run's costs has no lengths. A step's tokens are divided among
    ``config.learner.ranks``.

    Raises ConfigError for a profile of another model than ``config``'s, ValueError for a file that is not a profile.
    """
    costs = Fitted.read(path)
    content = json.loads(path.read_text(encoding="utf-8"))
    made, (base, token) = content["made"], costs.train_terms
    model = made.get("model", config.model.path)
    check(
        model == config.model.path,
        f"{path} was measured with model.path={model} and not with {config.model.path}; allowed: the same model, or a "
        "profile of this one.",
    )
    ranks = config.learner.ranks
    costs = replace(costs, train_terms=(base, token * made.get("ranks", ranks) / ranks))
    if "lengths" not in content:
        return Given(costs)
    lengths = Workload.from_lengths(content["lengths"]["prompt"], content["lengths"]["responses"])
    beside = content["interference"]
    return Given(costs, lengths, interference=(beside["learner"], beside["generator"]))


def cores_of(config: RunConfig, available: Collection[int]) -> Cores | None:
    """The cores that the parts of a run under Ray share on one machine with these cores; None if GPUs, an endpoint or
    processes of vLLM do the work, whose time is not CPU time of the parts."""
    away = config.generator.engine == "vllm" or config.reward.kind in ("http", "judge", "sum")
    if config.runtime != "ray" or away or max(config.generator.gpus, config.learner.gpus) > 0:
        return None
    own, count = config.learner, len(available)
    others = sum(p.cpus for p in parts_of(specs(config, config.weights), config.cluster) if p.kind != "learner")
    apart = not placement_plan(config).sharing and not config.episode.used
    if apart and (split := split_cores(available, own.ranks, own.threads, others)) is not None:
        return Cores(len(split.others))
    return Cores(count, own.ranks * max(1, own.threads))
