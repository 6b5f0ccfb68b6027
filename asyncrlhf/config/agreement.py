"""What the parts of a run's configuration must agree on; each disagreement is refused in one sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrlhf.buffer.checks import validate_flow
from asyncrlhf.engines.groups import replica_kinds
from asyncrlhf.validation import check

if TYPE_CHECKING:
    from asyncrlhf.config.run_config import RunConfig


def check_agreement(config: RunConfig) -> None:
    """Raise ConfigError for the first disagreement."""
    validate_flow(
        config.async_,
        config.buffer,
        batch_size=config.batch_size,
        num_generations=config.num_generations,
        publish_every=config.weights.publish_every,
        purge_on_publish=config.algorithm.purge_on_publish,
    )
    _check_groups(config)
    _check_shaped_rewards(config)
    _check_adapter(config)
    _check_runtime(config)


def _check_shaped_rewards(config: RunConfig) -> None:
    algorithm = config.algorithm
    whole = algorithm.whole_sequences
    check(
        config.async_.over_stale != "mask" or not whole,
        f"async.over_stale=mask takes tokens out of sequences that algorithm.{whole} looks at as a whole, which moves "
        "what it converges to; allowed: over_stale=drop, wait or downweight.",
    )
    check(
        not (config.buffer.filter_zero_spread and algorithm.kl == "reward"),
        "buffer.filter_zero_spread=true compares scores alone, but algorithm.kl=reward tells siblings of equal score "
        "apart; allowed: filter_zero_spread=false, or kl=loss.",
    )


def _check_groups(config: RunConfig) -> None:
    if config.algorithm.group_relative:
        check(
            config.num_generations >= 2,
            f"num_generations={config.num_generations} with algorithm={config.algorithm.name} "
            f"({config.algorithm.comparison}) leaves nothing to compare with; allowed: >= 2.",
        )
    groups = config.batch_size // config.num_generations
    check(
        config.algorithm.minibatches <= groups,
        f"algorithm.minibatches={config.algorithm.minibatches} is more than the {groups} groups of a batch.",
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
        not rank or (config.learner.backend == "torch" and config.learner.sharding == "none"),
        f"model.lora.r={rank} does not work with {config.learner.layout}; "
        "allowed: learner.backend=torch learner.sharding=none.",
    )
    check(
        not rank or config.algorithm.anchor != "ema",
        f"model.lora.r={rank} does not work with algorithm.anchor=ema, which follows all of the weights.",
    )


def _check_runtime(config: RunConfig) -> None:
    check(
        not (config.critic_served and config.learner.sharded),
        f"critic.where=service does not work with {config.learner.layout}, which leaves no rank a whole critic to "
        "hand to the workers; allowed: critic.where=learner.",
    )
    growing = any(kind.config.max_replicas for kind in replica_kinds(config.generator))
    check(
        not growing or config.runtime == "ray",
        "max_replicas needs runtime=ray, for runtime=local has no cluster that grows; allowed: 0.",
    )
    if config.runtime != "local":
        check(
            config.weights.transport != "local",
            "weights.transport=local needs runtime=local; allowed under Ray: auto, collective, object_store, disk.",
        )
        return
    check(config.learner.ranks == 1, f"runtime=local has one learner rank, not learner.ranks={config.learner.ranks}.")
    check(
        config.weights.transport in ("auto", "local"),
        f"weights.transport={config.weights.transport} needs runtime=ray; allowed with runtime=local: auto, local.",
    )
