"""From a config to the parts of a run: their specs, their seats, and the runtime that hosts them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrlhf.actors.annotator import RewardSpec
from asyncrlhf.actors.episodes import EpisodeSpec
from asyncrlhf.actors.learner import LearnerSpec
from asyncrlhf.actors.model_annotators import CriticSpec, ReferenceSpec
from asyncrlhf.actors.worker import GeneratorSpec
from asyncrlhf.cluster.handles import Runtime
from asyncrlhf.cluster.one_gpu import beside_the_learner, learner_needs
from asyncrlhf.cluster.placement import Plan, Specs, make_plan, parts_of
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.engines.generator_config import GeneratorConfig, replica_kinds
from asyncrlhf.errors import ConfigError
from asyncrlhf.models.checkpoint_folder import context_length
from asyncrlhf.models.teacher import check_teacher
from asyncrlhf.records.write.rollout_tokens import TOKENS_FOLDER
from asyncrlhf.transport.weights_config import WeightsConfig, resolve_dtype
from asyncrlhf.types import Prompt
from asyncrlhf.validation import check

if TYPE_CHECKING:
    from asyncrlhf.cluster.local_runtime import Workers


def wire_settings(config: RunConfig, run_dir: Path | None) -> WeightsConfig:
    """``weights`` with the values that depend on the run: dtype of transfers, checksums, and the folder of the
    transport ``disk``, which is created here. Raises ConfigError if it cannot be."""
    weights = replace(config.weights, dtype=resolve_dtype(config.weights.dtype, config.engine_dtypes) or "auto")
    if weights.checksum is None:
        weights = replace(weights, checksum=weights.verifies or bool(config.ray.cluster))
    if weights.transport != "disk":
        return weights
    folder = (Path(weights.disk_path) if weights.disk_path else (run_dir or Path()) / "weights").absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"weights.disk_path={folder} cannot be created: {error}.") from error
    check(os.access(folder, os.W_OK | os.X_OK), f"weights.disk_path={folder} cannot be written.")
    return replace(weights, disk_path=str(folder))


def generator_specs(config: RunConfig, weights: WeightsConfig | None = None) -> list[GeneratorSpec]:
    """The replicas that a run starts with; ``weights`` is the result of ``wire_settings``."""
    chunks = config.fusion.chunk_tokens if config.fusion.reads_ahead else 0
    kinds = replica_kinds(config.generator)
    replicas = sum(kind.config.replicas for kind in kinds)
    return [
        GeneratorSpec(
            kind.replica(number),
            sleeping(kind.config, config),
            config.model,
            config.runtime,
            weights or config.weights,
            chunks,
            config.stall_timeout_seconds,
            config.offloads,
            replicas=replicas,
            routes=config.learner.routing_replay,
        )
        for kind in kinds
        for number in range(kind.config.replicas)
    ]


def sleeping(generator: GeneratorConfig, config: RunConfig) -> GeneratorConfig:
    """The settings of a vLLM replica that shares the learner's GPUs: it frees their memory while the learner trains."""
    takes_turns = config.cluster.placement == "flatten" and generator.engine == "vllm" and generator.gpus > 0
    chosen = generator.vllm.sleep_level is not None or not takes_turns
    return generator if chosen else replace(generator, vllm=replace(generator.vllm, sleep_level=1))


def placement_plan(config: RunConfig, nodes: int = 1) -> Plan:
    """Which part sits on which device of a Ray with ``nodes`` nodes; raises ConfigError with one sentence."""
    return make_plan(config.cluster.placement, parts_of(specs(config, config.weights), config.cluster), nodes)


def specs(config: RunConfig, weights: WeightsConfig) -> Specs:
    """The specs of all parts; ``weights`` is the result of ``wire_settings``."""
    learner = LearnerSpec(
        learner=config.learner,
        algorithm=config.algorithm,
        model=config.model,
        runtime=config.runtime,
        weights=weights,
        temperature=config.generator.temperature,
        max_completion_length=config.generator.max_completion_length,
        steps=config.steps,
        seed=config.seed,
        reference_served=config.reference_served,
        critic_served=config.critic_served,
        makes_room=config.checkpoint.every > 0,
        offloads=config.offloads,
    )
    reward = RewardSpec(
        config.reward,
        config.task,
        config.model,
        config.generator.max_completion_length,
        config.fusion.cache_tokens if config.reward_reads_ahead else 0,
        answer_seconds(config, config.reward.model_timeout_seconds),
        config.max_restarts,
    )
    generators = generator_specs(config, weights)
    services = reference_spec(config), critic_spec(config, weights), episode_spec(config)
    return Specs(generators, learner, reward, *services)


def build_runtime(config: RunConfig, run_dir: Path | None = None, workers: Workers | None = None) -> Runtime:
    """Build the parts' specs and the runtime that ``runtime`` names. ``run_dir``: the folder of checkpoints and of
    ranks' records. ``workers``: replacements of the real ones, for ``runtime=local``."""
    wanted = specs(config, wire_settings(config, run_dir))
    if config.cluster.placement == "one_gpu":
        wanted = beside_the_learner(wanted, learner_needs(config))
    if run_dir is not None and config.logging.rollout_tokens:
        folder, sampled = run_dir.resolve() / TOKENS_FOLDER, config.logging.rollout_tokens
        wanted = replace(wanted, learner=replace(wanted.learner, tokens_folder=folder, tokens_sampled=sampled))
    if config.runtime == "local":
        from asyncrlhf.cluster.local_runtime import LocalRuntime

        return LocalRuntime(wanted, placement_plan(config).sharing, workers)
    from asyncrlhf.cluster.ray_runtime import RayRuntime

    return RayRuntime(config.cluster, config.ray, wanted, config.stall_timeout_seconds, run_dir)


def answer_seconds(config: RunConfig, own_limit: float = 0.0) -> float:
    """The deadline of one call of a reward, reference or critic worker, after which the worker counts as dead even if
    its process lives: longer than any normal call. A frozen worker is found much earlier, by its missing ping answer.
    A worker with its own limit on model passes gets ``own_limit`` plus one minute."""
    return max(5 * config.stall_timeout_seconds, own_limit + 60.0 if own_limit else 0.0)


def critic_spec(config: RunConfig, weights: WeightsConfig) -> CriticSpec | None:
    """The spec of critic workers; None if the learner computes values itself, or the algorithm has no critic."""
    if not config.critic_served:
        return None
    return CriticSpec(
        config.critic,
        config.model,
        config.learner.mixed_precision,
        config.runtime,
        weights,
        answer_seconds(config),
        config.max_restarts,
        config.learner.deterministic,
    )


def reference_spec(config: RunConfig) -> ReferenceSpec | None:
    """The spec of reference workers; None if the learner computes the log-probs itself, or the algorithm needs none."""
    if not config.reference_served:
        return None
    return ReferenceSpec(
        config.reference,
        config.model,
        config.generator.temperature,
        config.learner.mixed_precision,
        config.learner.float32_head,
        config.fusion.cache_tokens if config.reference_reads_ahead else 0,
        answer_seconds(config),
        config.max_restarts,
        config.learner.deterministic,
    )


def episode_spec(config: RunConfig) -> EpisodeSpec | None:
    """The spec of the workers that play episodes; None if a rollout is one answer."""
    if not config.episode.used:
        return None
    own = [kind.config for kind in replica_kinds(config.generator)]
    limits = [one.vllm.max_model_len for one in own if one.engine == "vllm" and one.vllm.max_model_len]
    context = min([context_length(config.model), *limits])
    return EpisodeSpec(
        config.episode, config.task, config.model, context, config.stall_timeout_seconds, config.max_restarts
    )


def check_episodes(config: RunConfig, prompt: Prompt) -> list[str]:
    """Open an episode of ``prompt``; raises ConfigError if that cannot be. Returns sentences for the user."""
    spec = episode_spec(config)
    if spec is None:
        return []
    driver = spec.driver(inline=True)
    try:
        return driver.check(prompt)
    finally:
        driver.close()


def service_notes(config: RunConfig) -> list[str]:
    """Sentences for the user about the services that the settings ask for. Raises ConfigError for a reference model
    that cannot be a teacher of the policy."""
    name, notes = config.algorithm.name, []
    teachers = config.reference.given
    if teachers:
        length = context_length(config.model)
        if not config.episode.used:
            length = min(length, config.task.max_prompt_length + config.generator.max_completion_length)
        for key, path in teachers.items():
            notes += check_teacher(config.model, config.model.other(path), length, key)
    check(
        config.algorithm.advantage != "none" or teachers or config.algorithm.kl_target == "mu",
        f"algorithm={name} with advantage=none learns from a teacher alone, and has none; allowed: reference.path, "
        "reference.teachers, or another advantage.",
    )
    if config.reference.workers and not config.reference_served:
        notes.append(f"No reference worker is started: algorithm={name} needs no reference policy.")
    if config.critic.workers and not config.critic_served:
        notes.append(f"No critic worker is started: algorithm={name} has no critic.")
    return notes
