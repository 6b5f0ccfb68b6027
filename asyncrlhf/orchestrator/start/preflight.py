"""Checks before a run: the learner must know the probability of every token, the folder must take the records, and the
machine must have the devices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from asyncrlhf.cluster.nodes import shortage, this_machine
from asyncrlhf.cluster.one_gpu import beside_the_learner, learner_needs, said_of_memory
from asyncrlhf.cluster.parts import placement_plan, specs
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.data.number_formats import cpu_has_bfloat16
from asyncrlhf.engines.generator_config import VLLM_MAX_TOP_K, GeneratorConfig, replica_kinds
from asyncrlhf.errors import ConfigError
from asyncrlhf.orchestrator.start.interruption import STOP_FILE
from asyncrlhf.records.write.attempts import ATTEMPTS_FILE
from asyncrlhf.records.write.checkpoint import FOLDER
from asyncrlhf.records.write.journal import JOURNAL_FILE
from asyncrlhf.records.write.record_marker import ROLLOUTS_FOLDER
from asyncrlhf.records.write.recorder import CONFIG_FILE, METRICS_FILE, SUMMARY_FILE
from asyncrlhf.records.write.rollout_tokens import TOKENS_FOLDER
from asyncrlhf.records.write.run_lock import LOCK_FILE
from asyncrlhf.records.write.spans import SPANS_FOLDER
from asyncrlhf.records.write.status import STATUS_FILE
from asyncrlhf.validation import check, check_versions

ERROR_FILE = "error.txt"
FILES = (CONFIG_FILE, METRICS_FILE, JOURNAL_FILE, STATUS_FILE, SUMMARY_FILE, ERROR_FILE, ATTEMPTS_FILE, LOCK_FILE)
FOLDERS = (FOLDER, ROLLOUTS_FOLDER, SPANS_FOLDER, TOKENS_FOLDER, "weights", "report", "wandb", "tensorboard")
# Fields of vLLM's SamplingParams that leave every token a positive probability.
WEIGHABLE = ("frequency_penalty", "presence_penalty")


def check_truncation(generator: GeneratorConfig) -> None:
    """Refuse truncated sampling with an engine that does not report each token's kept set. Every algorithm needs it:
    the gradient of E[R] needs E[grad log pi] = 0, and metrics compare with the sampler. Other stages only sample."""
    told = generator.top_p == 1 and generator.min_p == 0 and generator.top_k <= VLLM_MAX_TOP_K
    check(
        told or all(kind.config.engine != "vllm" for kind in replica_kinds(generator)),
        f"generator.top_p={generator.top_p:g} generator.top_k={generator.top_k} generator.min_p={generator.min_p:g} "
        "exclude tokens that generator.engine=vllm does not report, so the learner could not renormalise its policy "
        f"over the kept ones; allowed: top_p=1 min_p=0 top_k<={VLLM_MAX_TOP_K}, or generator.engine=hf.",
    )


def check_penalties(config: RunConfig) -> None:
    """Refuse penalties under an algorithm that does not correct for them. A penalty makes the sampler differ from the
    model's policy; the sampler's log-probs are recorded, so that training is right if the loss weighs by pi / mu."""
    generator, algorithm = config.generator, config.algorithm
    asked = {"repetition_penalty": generator.repetition_penalty} if generator.repetition_penalty != 1 else {}
    more = generator.generation_kwargs or {}
    given = {**asked, **{f"generation_kwargs.{name}": value for name, value in more.items()}}
    said = ", ".join(f"generator.{name}={value}" for name, value in given.items())
    strange = [name for name in more if name not in WEIGHABLE]
    check(
        not strange,
        f"generator.generation_kwargs.{strange and strange[0]} may exclude tokens without the learner's knowledge; "
        f"allowed in training: {', '.join(WEIGHABLE)}.",
    )
    check(
        not given or algorithm.correction != "none" or algorithm.anchor == "mu",
        f"{said} samples from another distribution than the policy's, and algorithm={algorithm.name} does not "
        "correct the difference; allowed: no penalty, or algorithm.correction, or algorithm.anchor=mu.",
    )


def check_engine_versions(config: RunConfig) -> None:
    """Refuse versions of vLLM and DeepSpeed that were not tried, if the run uses them: both are entered deeply."""
    used = ["vllm"] if any(kind.config.engine == "vllm" for kind in replica_kinds(config.generator)) else []
    check_versions(*used, *(["deepspeed"] if config.learner.backend == "deepspeed" else []))


def slow_formats(config: RunConfig) -> list[str]:
    """A note on parts that compute in bfloat16 on this machine's CPU, if it lacks instructions for that; else none."""
    if config.ray.cluster or cpu_has_bfloat16():
        return []
    training = config.learner.gpus == 0 and config.learner.mixed_precision == "bfloat16"
    slow = ["learner.mixed_precision"] if training else []
    for generator in (kind.config for kind in replica_kinds(config.generator)):
        own = generator.engine == "vllm" and generator.vllm.dtype != "auto"
        dtype = generator.vllm.dtype if own else config.model.dtype
        if generator.engine != "fake" and generator.gpus == 0 and dtype == "bfloat16":
            slow.append("generator.vllm.dtype" if own else "model.dtype")
    said = " and ".join(f"{name}=bfloat16" for name in dict.fromkeys(slow))
    note = f"{said}: this CPU has no instructions for bfloat16; products take many times as long as in float32."
    return [note] if said else []


def gpu_notes(config: RunConfig) -> list[str]:
    """What a user of this machine's GPU should know: who may take what of its memory, or that it is not used. Raises
    ConfigError if the memory cannot suffice."""
    found = 0 if config.ray.cluster else torch.cuda.device_count()
    if not found:
        return []
    if config.cluster.placement == "one_gpu":
        needs = learner_needs(config)
        generators = beside_the_learner(specs(config, config.weights), needs).generators
        return [said_of_memory(needs, generators, torch.cuda.get_device_properties(0).total_memory)]
    if placement_plan(config).total("GPU"):
        return []
    return [
        f"{found} GPU{'s are' if found > 1 else ' is'} here, and this run uses none: cluster=one_gpu puts learner and "
        "generators on one."
    ]


def check_places(run_dir: Path) -> None:
    """Refuse a run's folder in which the name of a file that the run writes is a folder's, or the reverse."""
    for name in (*FILES, STOP_FILE):
        check(not (run_dir / name).is_dir(), f"run_dir={run_dir} cannot be used: its {name} is a folder, and no file.")
    for name in FOLDERS:
        path = run_dir / name
        there = path.is_symlink() or path.exists()
        check(not there or path.is_dir(), f"run_dir={run_dir} cannot be used: its {name} is a file, and no folder.")


def check_devices(config: RunConfig) -> None:
    """Refuse GPUs that this machine lacks: Ray would wait for ever. A Ray cluster's GPUs are not checked here."""
    check(
        config.cluster.node_labels is None or (config.runtime == "ray" and config.ray.cluster),
        f"cluster.node_labels={config.cluster.node_labels} chooses among the nodes of a cluster, and "
        f"{'ray.address names none' if config.runtime == 'ray' else 'runtime=local has none'}; allowed: null.",
    )
    plan = placement_plan(config)
    if plan.total("GPU") == 0 or (config.runtime == "ray" and config.ray.cluster):
        return
    found = torch.cuda.device_count()
    services = {"reward": config.reward.gpus, "reference": config.reference.gpus, "critic": config.critic.gpus}
    asked = "".join(f"{name}.gpus={gpus:g}, " for name, gpus in services.items() if gpus)
    asked += f"generator.gpus={config.generator.gpus:g} and learner.gpus={config.learner.gpus:g}"
    if config.runtime == "local":
        # All parts are in one process, where they share the first GPU.
        check(found, f"{asked} need a GPU for runtime=local; torch sees 0 on this machine.")
        return
    lacking = shortage(plan, [this_machine(plan, found)])
    if lacking is not None:
        raise ConfigError(
            f"{lacking.rstrip('.')} ({asked}; torch sees {found} on this machine), and ray.address names no cluster."
            f"{_flatten_hint(config, found)}"
        )


def _flatten_hint(config: RunConfig, gpus: int) -> str:
    """A hint to take turns on the GPUs, if there are enough for that; else empty."""
    try:
        plan = placement_plan(replace(config, cluster=replace(config.cluster, placement="flatten")))
    except ConfigError:
        return ""
    fits = shortage(plan, [this_machine(plan, gpus)]) is None
    return " With cluster.placement=flatten generators and learner would take turns on them." if fits else ""
