"""Checks of ``async.*`` and ``buffer.*`` together: refuses settings that would stop a run or have no effect."""

from __future__ import annotations

from asyncrlhf.buffer.admission import resolve_capacity
from asyncrlhf.buffer.async_config import PRIORITIES, AsyncConfig, BufferConfig
from asyncrlhf.validation import check, check_range


def validate_flow(
    config: AsyncConfig,
    buffer: BufferConfig,
    *,
    batch_size: int,
    num_generations: int,
    publish_every: int,
    purge_on_publish: bool = False,
    curriculum: str = "off",
) -> None:
    """Raise ConfigError for settings with which the loop would stop forever, or that contradict each other."""
    check_range("num_generations", num_generations, low=1)
    check_range("batch_size", batch_size, low=1)
    check(
        batch_size % num_generations == 0,
        f"batch_size={batch_size} is not a multiple of num_generations={num_generations}; a batch holds whole groups.",
    )
    capacity = resolve_capacity(buffer, config, batch_size)
    check(
        buffer.sampling_correction == 1 or buffer.sampling in PRIORITIES,
        f"buffer.sampling_correction={buffer.sampling_correction:g} has nothing to correct under "
        f"buffer.sampling={buffer.sampling}, which favours no group; allowed: 1, or sampling={PRIORITIES[0]}.",
    )
    check(
        curriculum == "off" or not config.fixed_lag,
        f"task.curriculum={curriculum} draws by the answers that have ended, which no two runs of "
        f"async.mode={config.mode} see alike; allowed: curriculum=off, or mode=async or sync.",
    )
    if config.fixed_lag is None:
        _validate_free(config, buffer, batch_size, capacity, publish_every)
        _validate_replay(config, buffer, batch_size, num_generations, capacity)
        check(
            not (purge_on_publish and publish_every == 1 and buffer.max_reuse > 1),
            f"algorithm.purge_on_publish empties the buffer after every step (weights.publish_every=1), so that "
            f"buffer.max_reuse={buffer.max_reuse} trains no group twice; allowed: max_reuse=1, or publish_every >= 2.",
        )
    else:
        _validate_scheduled(config, buffer, batch_size, capacity, publish_every)


def _validate_free(
    config: AsyncConfig, buffer: BufferConfig, batch_size: int, capacity: int, publish_every: int
) -> None:
    check(
        config.pacing != "just_in_time" or buffer.plain,
        f"async.pacing=just_in_time keeps nothing ready beyond the next batch, and leaves "
        f"buffer.sampling={buffer.sampling} with max_reuse={buffer.max_reuse} nothing to choose from; "
        "allowed: pacing=fill, or buffer=fifo.",
    )
    name, bound = config.least_bound
    fresh = buffer.admission_bound(bound)
    half = " (buffer.replay_fraction keeps half of it for replay)" if buffer.replays else ""
    allowed = "publish_every <= that half + 1" if buffer.replays else f"publish_every <= {name} + 1"
    check(
        publish_every <= fresh + 1,
        f"weights.publish_every={publish_every} with async.{name}={bound}{half} would stall the run: the replicas' "
        f"weights exceed the bound before the next publish; allowed: {allowed}.",
    )
    # A group is taken once a step, so its last use is at least max_reuse - 1 steps after its first.
    check(
        buffer.replays or buffer.max_reuse + publish_every <= bound + 2,
        f"buffer.max_reuse={buffer.max_reuse} with weights.publish_every={publish_every} passes "
        f"async.{name}={bound}: each reuse makes a rollout one step older; "
        f"allowed: max_reuse + publish_every <= {name} + 2.",
    )
    check(
        capacity >= batch_size,
        f"buffer.capacity={capacity} cannot hold one batch; allowed: 0 (automatic) or >= batch_size={batch_size}.",
    )


def _validate_replay(
    config: AsyncConfig, buffer: BufferConfig, batch_size: int, num_generations: int, capacity: int
) -> None:
    fraction = buffer.replay_fraction
    if not buffer.replays:
        for key in ("max_age", "warmup_steps"):
            value = getattr(buffer, key)
            check(
                value == 0,
                f"buffer.{key}={value} has nothing to hold back without replay; allowed: 0, or replay_fraction > 0.",
            )
        return
    check(
        buffer.max_reuse >= 2,
        f"buffer.replay_fraction={fraction:g} with buffer.max_reuse={buffer.max_reuse} can never replay; "
        f"allowed: max_reuse >= 2, the first training counted.",
    )
    check(
        config.bound >= 1,
        f"buffer.replay_fraction={fraction:g} with async.max_staleness=0 can never replay, because a group trained "
        "once is one step old; allowed: max_staleness >= 1.",
    )
    check(
        buffer.max_age <= config.bound,
        f"buffer.max_age={buffer.max_age} passes async.max_staleness={config.bound}, which holds for replay "
        f"too; allowed: 0 (that bound) to {config.bound}.",
    )
    groups = batch_size // num_generations
    check(
        buffer.replay_groups(groups) >= 1,
        f"buffer.replay_fraction={fraction:g} of a batch of {groups} groups is less than one whole group; "
        f"allowed: replay_fraction / (1 + replay_fraction) x {groups} >= 1 and a batch of two groups or more.",
    )
    check(
        capacity >= 2 * batch_size,
        f"buffer.capacity={capacity} leaves replay no room beside a fresh batch; "
        f"allowed: 0 (automatic) or >= {2 * batch_size}.",
    )


def _validate_scheduled(
    config: AsyncConfig, buffer: BufferConfig, batch_size: int, capacity: int, publish_every: int
) -> None:
    mode, lag = config.mode, config.bound
    check(
        config.pacing == "fill",
        f"async.pacing={config.pacing} has nothing to pace in async.mode={mode}, where the version of each batch is "
        "fixed; allowed: fill, or mode=async.",
    )
    check(
        publish_every == 1,
        f"weights.publish_every={publish_every} breaks the exact schedule of async.mode={mode}; allowed: 1.",
    )
    check(
        buffer.max_reuse == 1,
        f"buffer.max_reuse={buffer.max_reuse} breaks the exact schedule of async.mode={mode}; "
        f"allowed: 1, or mode=async.",
    )
    check(
        not buffer.replays and buffer.max_age == 0 and buffer.warmup_steps == 0,
        f"buffer.replay_fraction, max_age and warmup_steps break the exact schedule of async.mode={mode}; "
        f"allowed: 0, or mode=async.",
    )
    check(
        buffer.sampling == "fifo",
        f"buffer.sampling={buffer.sampling} has nothing to choose in async.mode={mode}, where each batch is fixed; "
        f"allowed: fifo, or mode=async.",
    )
    least = (lag + 1) * batch_size
    check(
        capacity >= least,
        f"buffer.capacity={capacity} cannot hold the {lag + 1} batches that async.mode={mode} keeps; "
        f"allowed: 0 (automatic) or >= {least}.",
    )
