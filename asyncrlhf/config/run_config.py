"""The root of the configuration: settings of every layer, the checks between them, and Hydra's schema for them."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from asyncrlhf.buffer.async_config import AsyncConfig, BufferConfig
from asyncrlhf.buffer.checks import validate_flow
from asyncrlhf.config.environment_config import CheckpointConfig, ClusterConfig, LoggingConfig, RayConfig
from asyncrlhf.config.stage_config import EvaluationConfig, PreferencesConfig, RewardTrainingConfig, SftConfig
from asyncrlhf.config.sweep_config import SweepConfig
from asyncrlhf.data.data_config import ModelConfig, TaskConfig
from asyncrlhf.data.number_formats import AUTO, suits_bfloat16
from asyncrlhf.engines.generator_config import GeneratorConfig, replica_kinds
from asyncrlhf.episodes.episode_config import EpisodeConfig
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.settings.learner_config import CriticConfig, LearnerConfig, ReferenceConfig
from asyncrlhf.rewards.reward_config import FusionConfig, RewardConfig
from asyncrlhf.transport.weights_config import Tolerance, WeightsConfig, choose_tolerance
from asyncrlhf.validation import MONTH, check, check_folder_name, check_path, check_settings, group, setting


@dataclass(frozen=True)
class RunConfig:
    """All settings of one run. Written ``async`` in YAML and on the command line, ``async_`` here (a keyword)."""

    name: str = setting("", "Name of the run's folder, below runs/; empty: as task.kind.")
    run_dir: str = setting("", "The run's own folder; empty is runs/NAME/TIME.", common=True)
    seed: int = setting(0, "Seed of prompts, sampling and the learner's draws.", low=0, high=2**31 - 1, common=True)
    steps: int = setting(500, "Learner steps of the run.", low=1, high=10**9, common=True)
    batch_size: int = setting(128, "Rollouts that a learner step trains on.", low=1, high=10**7, common=True)
    num_generations: int = setting(
        8, "Rollouts per prompt: the group within which advantages are computed.", low=1, high=10**5, common=True
    )
    runtime: str = setting(
        "ray", "Actors on Ray, or all parts in one process on a virtual clock (local).", choices=("ray", "local")
    )
    eval_every: int | None = setting(
        None,
        "Learner steps between held-out evaluations, besides those at start and end; 0: only those; null: 100 in "
        "`train` (two of a hundred answers), 0 in the stages.",
        low=0,
    )
    stall_timeout_seconds: float = setting(
        600.0, "Seconds without progress after which the run reports what it waits for and replaces hanging parts; "
        "after twice as many it fails.",
        low=1, high=MONTH,
    )  # fmt: skip
    max_failure_fraction: float = setting(
        0.5,
        "Largest share of failures among the last batch_size rollouts, above which the run ends; 0: at the first.",
        low=0,
        high=1,
    )
    restarts: int = setting(
        0,
        "`asyncrlhf train`: how often a run that fails, or whose process dies, begins again from its newest checkpoint "
        "without having made a step since.",
        low=0,
        high=10**6,
        common=True,
    )
    max_restarts: int = setting(
        3,
        "Restarts of a part that dies: of a replica in all, of a worker in a row, of the learner without a step in "
        "between; after them the others do its work, or the run ends.",
        low=0,
    )
    model: ModelConfig = group(ModelConfig, "The checkpoint that training starts from.")
    task: TaskConfig = group(TaskConfig, "Where prompts come from.")
    algorithm: AlgorithmConfig = group(AlgorithmConfig, "The switches of the loss; a preset sets several.")
    async_: AsyncConfig = group(AsyncConfig, "How generation and training overlap, and how stale data may be.")
    generator: GeneratorConfig = group(GeneratorConfig, "The generators: engine, replicas, sampling.")
    learner: LearnerConfig = group(LearnerConfig, "The learner: backend, ranks, optimizer, memory.")
    weights: WeightsConfig = group(WeightsConfig, "How weights travel from learner to generators.")
    buffer: BufferConfig = group(BufferConfig, "The buffer of finished rollouts, and how often each is trained.")
    episode: EpisodeConfig = group(EpisodeConfig, "Tools and environments, with which a rollout has several turns.")
    reward: RewardConfig = group(RewardConfig, "Where rewards come from.")
    fusion: FusionConfig = group(FusionConfig, "How scoring is fused with generation.")
    reference: ReferenceConfig = group(ReferenceConfig, "Where the frozen reference model runs, if needed.")
    critic: CriticConfig = group(CriticConfig, "Where the critic's values are computed, if there is a critic.")
    logging: LoggingConfig = group(LoggingConfig, "What is recorded and shown.")
    checkpoint: CheckpointConfig = group(CheckpointConfig, "When a run is saved, and what it resumes from.")
    cluster: ClusterConfig = group(ClusterConfig, "Which parts share devices.")
    ray: RayConfig = group(RayConfig, "The Ray cluster and its share of this machine.")
    sft: SftConfig = group(SftConfig, "`asyncrlhf sft`: fine-tuning by TRL's SFTTrainer.")
    preferences: PreferencesConfig = group(PreferencesConfig, "`asyncrlhf preferences`: pairs of a model's answers.")
    reward_model: RewardTrainingConfig = group(
        RewardTrainingConfig, "`asyncrlhf reward-model`: a reward model by TRL's RewardTrainer."
    )
    evaluation: EvaluationConfig = group(EvaluationConfig, "Held-out answers, in a run and in `asyncrlhf evaluate`.")
    sweep: SweepConfig = group(SweepConfig, "`asyncrlhf sweep`: a grid of runs; a single run ignores it.")

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.task.kind)
        check_folder_name("name", self.name)
        check_path("run_dir", self.run_dir)
        object.__setattr__(self, "run_dir", os.path.expanduser(self.run_dir))
        check_settings("", self)
        if self.model.dtype == AUTO:
            fast = all(suits_bfloat16(kind.config.gpus) for kind in replica_kinds(self.generator))
            object.__setattr__(self, "model", replace(self.model, dtype="bfloat16" if fast else "float32"))
        check_agreement(self)

    @property
    def saves_at_end(self) -> bool:
        """Whether a finished run leaves a checkpoint of its last step."""
        return self.checkpoint.every > 0 or self.checkpoint.at_end is not False

    @property
    def heldout_word(self) -> str:
        """Held-out figures as users read them: accuracy or reward."""
        reward = self.reward
        return heldout_word(reward.kind, self.task.kind, reward.missing_eos_penalty or reward.overlong_buffer)

    @property
    def just_in_time(self) -> bool:
        """Whether admission is paced by the learner's requests, see ``orchestrator/learning/lead.py``."""
        return self.async_.pacing == "just_in_time"

    @property
    def evaluates_every(self) -> int:
        """Learner steps between two held-out evaluations of ``train``; 0 is none."""
        return 100 if self.eval_every is None else self.eval_every

    @property
    def reference_model(self) -> ModelConfig:
        """The checkpoint of the reference policy."""
        return self.model.other(self.reference.path)

    @property
    def reference_served(self) -> bool:
        """Whether separate workers compute the reference's log-probs; only if the algorithm needs them."""
        return self.reference.workers > 0 and self.algorithm.needs_reference

    @property
    def reward_reads_ahead(self) -> bool:
        """Whether reward workers should read ahead; a worker whose models cannot says so."""
        return self.fusion.reads_ahead and any(p.kind == "model" for p in self.reward.sources.values())

    @property
    def reference_reads_ahead(self) -> bool:
        """Whether reference workers should read ahead. Truncated sampling forbids it: its kept sets are known only at
        the end."""
        return self.fusion.reads_ahead and self.reference_served and not self.generator.truncated

    @property
    def critic_served(self) -> bool:
        """Whether separate workers compute the critic's old values; only if the algorithm has a critic."""
        return self.critic.workers > 0 and self.algorithm.needs_critic

    @property
    def offloads(self) -> bool:
        """Whether the learner leaves its devices to the generators between its turns."""
        asked = self.cluster.offload
        able = self.learner.backend == "torch" and self.learner.pipeline_parallel_size == 1
        wanted = self.learner.gpus > 0 and able if asked is None else asked
        return wanted and self.cluster.placement == "flatten"

    @property
    def engine_dtypes(self) -> list[str]:
        """The compute dtype of each kind of replica; the fake engine has none. An adapter is merged into other weights,
        so it is sent unchanged to every engine."""
        if self.model.lora.r:
            return []
        kinds = [kind.config for kind in replica_kinds(self.generator) if kind.config.engine != "fake"]
        own = [kind.vllm.dtype if kind.engine == "vllm" else "auto" for kind in kinds]
        return [self.model.dtype if dtype == "auto" else dtype for dtype in own]

    @property
    def audit_tolerance(self) -> Tolerance:
        """Mean |log-prob difference| allowed between learner and engine at one version."""
        computed = {self.model.dtype, self.weights.dtype, *self.engine_dtypes} - {"auto"}
        exact = computed == {"float32"} and self.learner.mixed_precision == "none"
        return choose_tolerance(self.weights.audit_tolerance, exact)


def check_agreement(config: RunConfig) -> None:
    """Raise ConfigError for the first contradiction between settings."""
    validate_flow(
        config.async_,
        config.buffer,
        batch_size=config.batch_size,
        num_generations=config.num_generations,
        publish_every=config.weights.publish_every,
        purge_on_publish=config.algorithm.purge_on_publish,
        curriculum=config.task.curriculum,
    )
    _check_groups(config)
    _check_shaped_rewards(config)
    _check_teacher(config)
    _check_adapter(config)
    _check_pipeline(config)
    _check_routes(config)
    _check_episodes(config)
    _check_runtime(config)
    check_sharing(config)


def _check_shaped_rewards(config: RunConfig) -> None:
    algorithm = config.algorithm
    whole = algorithm.whole_sequences
    check(
        config.async_.over_stale != "mask" or not whole,
        f"async.over_stale=mask takes tokens out of sequences that algorithm.{whole} treats as a whole, which biases "
        "the result; allowed: over_stale=drop, wait or downweight.",
    )
    by_turn, by_batch = algorithm.credit == "turn", algorithm.advantage == "batch_mean"
    for compared, other, against, allowed in (
        ("scores alone", algorithm.kl == "reward", "kl=reward tells siblings of equal score apart", "kl=loss"),
        ("whole episodes", by_turn, "credit=turn tells siblings of equal score apart", "credit=episode"),
        ("siblings", by_batch, "advantage=batch_mean compares the whole batch", "advantage=group_mean"),
    ):
        check(
            not (config.buffer.filter_zero_spread and other),
            f"buffer.filter_zero_spread=true compares {compared}, but algorithm.{against}; allowed: "
            f"filter_zero_spread=false, or {allowed}.",
        )
    below_zero = {
        "algorithm.kl=reward": algorithm.kl == "reward",
        f"reward.normalize={config.reward.normalize}": config.reward.normalize != "none",
        f"reward.missing_eos_penalty={config.reward.missing_eos_penalty:g}": config.reward.missing_eos_penalty > 0,
        f"reward.overlong_buffer={config.reward.overlong_buffer}": config.reward.overlong_buffer > 0,
    }
    for what, there in below_zero.items():
        check(
            not there or algorithm.advantage != "mean_norm",
            f"{what} brings rewards below 0, and algorithm.advantage=mean_norm has a group's mean reward as its unit; "
            "allowed: without it, or another advantage.",
        )
    check(
        not by_turn or config.episode.used,
        "algorithm.credit=turn credits the turns of episodes, and without an environment, tools or agent there are "
        "none; allowed: with episode.environment, episode.tools or episode.agent, or credit=episode.",
    )
    check(
        not by_turn or config.reward.normalize == "none",
        f"reward.normalize={config.reward.normalize} rescales the reward of an episode, and not those of its turns, "
        "which algorithm.credit=turn subtracts from it; allowed: normalize=none, or credit=episode.",
    )


def _check_teacher(config: RunConfig) -> None:
    for key, path in config.reference.given.items():
        check(
            config.algorithm.needs_reference,
            f"{key}={path} has no effect, since algorithm={config.algorithm.name} compares with no reference policy; "
            "allowed: algorithm=distill, or another one with algorithm.kl=loss or reward.",
        )


def _check_groups(config: RunConfig) -> None:
    algorithm = config.algorithm
    compared = {"num_generations": algorithm.group_relative, "batch_size": algorithm.advantage == "batch_mean"}
    for key, compares in compared.items():
        check(
            not compares or getattr(config, key) >= 2,
            f"{key}={getattr(config, key)} with algorithm={algorithm.name} ({algorithm.comparison}) leaves nothing to "
            "compare with; allowed: >= 2.",
        )
    groups = config.batch_size // config.num_generations
    check(
        algorithm.minibatches <= groups,
        f"algorithm.minibatches={algorithm.minibatches} is more than the {groups} groups of a batch.",
    )
    check(
        config.learner.shares <= groups,
        f"learner.ranks={config.learner.ranks} makes {config.learner.shares} shares of a batch, which is more than the "
        f"{groups} groups of a batch.",
    )
    check(
        config.generator.temperature > 0,
        "generator.temperature=0 samples greedily and cannot be trained on; allowed: > 0.",
    )


def _check_adapter(config: RunConfig) -> None:
    rank = config.model.lora.r
    check(
        not rank or (config.learner.backend == "torch" and not config.learner.sharded),
        f"model.lora.r={rank} does not work with {config.learner.dealt_out or config.learner.layout}; "
        "allowed: learner.backend=torch learner.sharding=none.",
    )
    check(
        not rank or config.algorithm.anchor != "ema",
        f"model.lora.r={rank} does not work with algorithm.anchor=ema, which follows all of the weights.",
    )


def _check_pipeline(config: RunConfig) -> None:
    size = config.learner.pipeline_parallel_size
    for what, there in (
        ("a critic", config.algorithm.needs_critic),
        ("algorithm.anchor=ema", config.algorithm.anchor == "ema"),
    ):
        check(
            size == 1 or not there,
            f"learner.pipeline_parallel_size={size} does not work with {what}, which goes with the whole policy; "
            "allowed: pipeline_parallel_size=1.",
        )


def _check_routes(config: RunConfig) -> None:
    """Whether every replica can report the experts of each token, if the learner shall follow them."""
    if not config.learner.routing_replay:
        return
    for own in (kind.config for kind in replica_kinds(config.generator)):
        reported = {
            "engine=fake": own.engine != "fake",
            "gpus=0 with engine=vllm, which cannot on a CPU,": own.engine != "vllm" or own.gpus > 0,
        }
        if own.engine == "vllm":
            reported |= {
                "vllm.engine_kwargs.enable_prefix_caching=false": own.vllm.shares_prompts,
                f"vllm.pipeline_parallel_size={own.vllm.pipeline_parallel_size}": own.vllm.pipeline_parallel_size == 1,
                f"stop={own.stop} with engine=vllm": not own.stop,
            }
        for what, able in reported.items():
            check(
                able,
                f"learner.routing_replay=true needs the experts of each token, and generator.{what} does not report "
                "them; allowed: engine=hf, or engine=vllm on GPUs with prefix caching, without pipeline stages and "
                "stop texts.",
            )


def _check_episodes(config: RunConfig) -> None:
    scored = any(part.kind == "environment" for part in config.reward.sources.values())
    check(
        not scored or config.episode.used,
        "reward.kind=environment takes the reward that an environment or agent gives; allowed: with "
        "episode.environment or episode.agent.",
    )
    check(
        config.task.kind != "environment" or config.episode.used,
        "task.kind=environment has no prompts of its own; allowed: with an episode's environment, which asks.",
    )
    if not config.episode.used:
        return
    check(
        not config.episode.agents or config.runtime == "ray",
        "episode.agent and episode.agent_command call an endpoint in real time, and runtime=local has a virtual clock; "
        "allowed: runtime=ray.",
    )
    check(
        not config.learner.routing_replay,
        "learner.routing_replay=true follows the experts of one answer, not of an episode's turns; allowed: false.",
    )
    check(
        not config.fusion.reads_ahead,
        "fusion.granularity=chunk reads one answer ahead, and an episode has several turns; allowed: rollout, group or "
        "batch.",
    )


def _check_runtime(config: RunConfig) -> None:
    check(
        not (config.critic_served and config.learner.sharded),
        f"critic.workers={config.critic.workers} does not work with {config.learner.layout}, which leaves no "
        "rank a whole critic to hand to the workers; allowed: critic.workers=0.",
    )
    growing = any(kind.config.max_replicas for kind in replica_kinds(config.generator))
    check(
        not growing or config.runtime == "ray",
        "max_replicas needs runtime=ray, for runtime=local has no cluster that grows; allowed: 0.",
    )
    _check_pull(config)
    if config.runtime != "local":
        check(
            config.weights.transport != "local",
            "weights.transport=local needs runtime=local; allowed under Ray: auto, collective, object_store, disk.",
        )
        return
    check(config.learner.ranks == 1, f"runtime=local has one learner rank, not learner.ranks={config.learner.ranks}.")
    check(
        config.weights.transport in ("auto", "local", "relay"),
        f"weights.transport={config.weights.transport} needs runtime=ray; allowed with runtime=local: auto, local, "
        "relay.",
    )


def _check_pull(config: RunConfig) -> None:
    if config.async_.on_weight_update != "pull":
        return
    check(
        config.async_.fixed_lag is None,
        f"async.on_weight_update=pull lets every replica load when it likes, but async.mode={config.async_.mode} needs "
        "one exact version on all; allowed: async.mode=async, or drain, interrupt, in_flight.",
    )
    check(
        config.weights.relay,
        f"async.on_weight_update=pull loads what a replica's machine holds, which weights.transport="
        f"{config.weights.transport} does not keep; allowed: weights.transport=relay.",
    )
    check(
        config.cluster.placement != "flatten",
        "async.on_weight_update=pull lets replicas load while the learner trains, but with cluster.placement=flatten "
        "they sleep then; allowed: drain, interrupt, in_flight.",
    )


def heldout_word(kind: str, task: str, penalty: float) -> str:
    """``accuracy`` if held-out rewards are a rule's 0 or 1, else ``reward``. ``kind``, ``task``: the run's reward.kind
    and task.kind; ``penalty``: not 0 if rewards have one."""
    return "accuracy" if kind == "task" and task in ("arithmetic", "prompts") and not penalty else "reward"


KEEPS_MEMORY = (
    "cluster.placement=flatten with a learner that keeps its memory (cluster.offload=false, "
    "learner.backend=deepspeed, or learner.pipeline_parallel_size over 1) leaves vLLM an unknown share; set "
    "generator.vllm.gpu_memory_utilization."
)


def check_sharing(config: RunConfig) -> None:
    """Raise ConfigError for the first disagreement."""
    _check_offload(config)
    _check_one_gpu(config)
    _check_ipc(config)


def _gpus(config: RunConfig) -> tuple[float, float, bool]:
    """The GPUs of the learner, those of all replicas, and whether every part has some."""
    kinds = [kind.config for kind in replica_kinds(config.generator)]
    generators = sum(max(kind.replicas, kind.max_replicas) * kind.gpus for kind in kinds)
    least = min(config.learner.gpus, *(kind.gpus for kind in kinds))
    return config.learner.gpus * config.learner.ranks, generators, least > 0


def _check_one_gpu(config: RunConfig) -> None:
    if config.cluster.placement != "one_gpu":
        return
    own = config.learner
    learner, generators, on_gpu = _gpus(config)
    check(
        on_gpu and learner + generators <= 1 + 1e-6 and own.ranks == 1,
        f"cluster.placement=one_gpu deals out one GPU, and learner.gpus={own.gpus:g} for learner.ranks={own.ranks} and "
        f"{generators:g} for all replicas together are no shares of it; allowed: learner.ranks=1, and learner.gpus and "
        "every replica's generator.gpus over 0, at most 1 in the sum.",
    )
    check(
        all(kind.config.max_replicas <= kind.config.replicas for kind in replica_kinds(config.generator)),
        "cluster.placement=one_gpu has no further GPU that replicas could join on; allowed: max_replicas=0.",
    )
    services = {"reward": config.reward.gpus, "reference": config.reference.gpus, "critic": config.critic.gpus}
    taken = ", ".join(f"{name}.gpus={gpus:g}" for name, gpus in services.items() if gpus)
    check(
        not taken,
        f"cluster.placement=one_gpu divides the memory of one GPU between learner and generators, not with {taken}; "
        "allowed: gpus=0 there, or learner and generators by cluster.placement=separate.",
    )


def _check_ipc(config: RunConfig) -> None:
    if config.weights.transport != "cuda_ipc":
        return
    learner, generators, on_gpu = _gpus(config)
    # Without a plan Ray packs shares of a GPU onto one of this machine, but maybe not onto one of a cluster.
    shares = config.cluster.placement == "auto" and not config.ray.cluster and learner + generators <= 1 + 1e-6
    together = config.cluster.placement in ("flatten", "one_gpu") or shares
    check(
        together and on_gpu and generators <= 1 and config.learner.ranks == 1,
        "weights.transport=cuda_ipc hands over memory of one GPU that learner and generators share; allowed: "
        "cluster=one_gpu, or cluster=flatten, with learner.ranks=1, learner.gpus over 0, and generators on one GPU "
        "together.",
    )
    check(
        not (config.model.lora.r or config.learner.sharded),
        "weights.transport=cuda_ipc hands over whole weights, where model.lora.r and sharded learners send parts of "
        "them; allowed: weights.transport=collective.",
    )


def _check_offload(config: RunConfig) -> None:
    kinds = [kind.config for kind in replica_kinds(config.generator)]
    shared = [kind for kind in kinds if kind.engine == "vllm" and kind.gpus and config.learner.gpus]
    derived = any(kind.vllm.gpu_memory_utilization is None for kind in shared)
    check(config.cluster.placement != "flatten" or config.offloads or not derived, KEEPS_MEMORY)
    if not config.cluster.offload:
        return
    check(
        config.cluster.placement == "flatten",
        f"cluster.offload=true frees devices that learner and generators use in turns, and under "
        f"cluster.placement={config.cluster.placement} they do not; allowed: cluster.placement=flatten.",
    )
    check(
        config.learner.backend == "torch",
        f"cluster.offload=true does not work with learner.backend={config.learner.backend}, whose memory belongs to "
        "its engines; allowed: learner.backend=torch, or learner.zero_offload=cpu.",
    )
    check(
        config.learner.pipeline_parallel_size == 1,
        "cluster.offload=true does not work with learner.pipeline_parallel_size over 1; allowed: false.",
    )
    check(
        not any(kind.engine == "vllm" and kind.gpus == 0 for kind in kinds),
        "cluster.offload=true does not work with generator.engine=vllm on a CPU, where vLLM has no sleep mode; "
        "allowed: generator.engine=hf.",
    )
