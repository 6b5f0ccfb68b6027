"""From the first prompt to the last score of a batch, and from a last token to its score: the four granularities."""

from __future__ import annotations

import argparse
import asyncio
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist, fmean
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from asyncrlhf.actors.annotator import RewardSpec
from asyncrlhf.actors.messages import Collected, resolved
from asyncrlhf.actors.where import available_cores, keep_to
from asyncrlhf.actors.worker import GeneratorSpec
from asyncrlhf.bench.measure import QUIET, show, spread, tell, write
from asyncrlhf.cluster.handles import LONG_SECONDS
from asyncrlhf.cluster.own_ray import OwnRay
from asyncrlhf.cluster.ray_calls import START_SECONDS, ask
from asyncrlhf.cluster.ray_handles import RayAnnotator, RayGenerator, addressed
from asyncrlhf.config.compose import load_config
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.errors import AsyncRLHFError, ReplicaError
from asyncrlhf.models.checkpoint_folder import load_tokenizer
from asyncrlhf.orchestrator.controller import build_state
from asyncrlhf.orchestrator.rollouts.annotate import Collector, Rewards
from asyncrlhf.orchestrator.rollouts.assembly import Assembly
from asyncrlhf.orchestrator.rollouts.dispatch import Dispatcher
from asyncrlhf.orchestrator.run import Prepared, prepare
from asyncrlhf.orchestrator.state import Replica
from asyncrlhf.rewards.reward_config import GRANULARITIES
from asyncrlhf.types import Annotation, GenerationRequest, Rollout, RolloutInfo

SETTING = [
    *QUIET,
    "async.mode=sync",
    "steps=1",
    "num_generations=4",
    "generator.engine=hf",
    "generator.threads=1",
    "reward.threads=1",
    "reward.kind=model",
    "reward.model.inputs=ids",
]
CHUNK = "chunk"


def run(arguments: Sequence[str]) -> dict[str, Any]:
    """``--repeats`` rounds of each granularity in turn, in an order that is turned round every time; a round before
    them warms up and is left out. Each round has prompts of its own, the same for all four.

    Policy and reward model are random Llamas of one size, in a process with one thread each, on a core each where there
    are two. What is measured are the dispatch, collect and score loops of a run, without a learner. Other arguments are
    overrides.
    """
    parser = argparse.ArgumentParser(prog="asyncrlhf bench fusion", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16, help="responses, all of them in flight at once")
    parser.add_argument("--median", type=int, default=128, help="tokens of a response")
    parser.add_argument("--ratio", type=float, default=8.0, help="the longest response against the median")
    parser.add_argument("--hidden", type=int, default=384, help="width of both models")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--chunk-tokens", type=int, default=16)
    parser.add_argument("--out", type=Path, default=None)
    options, overrides = parser.parse_known_args(list(arguments))
    lengths = tailed_lengths(options.batch, options.median, options.ratio)
    with tempfile.TemporaryDirectory() as folder:
        make_models(Path(folder), options.hidden, options.layers, context=max(lengths) + 64)
        settings = [
            *SETTING,
            f"run_dir={folder}/run",
            f"model.path={folder}/policy",
            f"reward.model.path={folder}/reward",
            f"batch_size={options.batch}",
            f"generator.slots={options.batch}",
            f"generator.max_completion_length={max(lengths)}",
            f"fusion.chunk_tokens={options.chunk_tokens}",
            "fusion.granularity=chunk",
            *overrides,
        ]
        rounds = asyncio.run(_measure(load_config(settings), lengths, options.repeats))
    facts = {"batch": options.batch, "lengths": sorted(lengths), "chunk_tokens": options.chunk_tokens}
    facts |= {"hidden": options.hidden, "layers": options.layers, "overrides": overrides}
    return write({**_report(rounds), **facts}, options.out)


def tailed_lengths(count: int, median: int, ratio: float) -> list[int]:
    """Quantiles of the log-normal whose largest of ``count`` is ``ratio`` times the median."""
    normal = [NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)]
    return [max(1, round(median * math.exp(math.log(ratio) * z / normal[-1]))) for z in normal]


def make_models(folder: Path, hidden: int, layers: int, context: int) -> None:
    """A policy and a reward model of one size in ``folder``, with the tiny model's tokenizer."""
    tokenizer = load_tokenizer(ModelConfig())
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=context,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    for name, kind in (("policy", LlamaForCausalLM), ("reward", LlamaForSequenceClassification)):
        kind(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


@dataclass(frozen=True)
class Batch:
    """One batch of one granularity: seconds to its last score, and of each rollout seconds from its last token on, its
    reward and its tokens, by rollout id."""

    seconds: float
    latencies: dict[int, float]
    rewards: dict[int, float]
    tokens: dict[int, bytes]
    longest: int  # the rollout with most tokens
    prefilled: float  # share of the reward model's tokens that were read before their rollout's end


class _Recording(Assembly):
    """Notes when each score came."""

    scores: dict[int, tuple[RolloutInfo, Annotation, float]]

    def annotated(self, kind: str, info: RolloutInfo, annotation: Annotation) -> None:
        if annotation.reward is None:
            raise AsyncRLHFError(f"A rollout got no score: {annotation.error}")
        self.scores[annotation.rollout_id] = (info, annotation, self._state.now())
        super().annotated(kind, info, annotation)


class _Tailed:
    """A replica whose responses have the lengths that the benchmark wants."""

    def __init__(self, handle: RayGenerator, lengths: Sequence[int]) -> None:
        self._handle = handle
        self._lengths = lengths
        self._looking: asyncio.Future[Collected] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    async def submit(self, items: Sequence[GenerationRequest]) -> None:
        await self._handle.submit([self._cut(item) for item in items])

    async def collect(self) -> Collected:
        self._looking = asyncio.ensure_future(self._handle.collect())
        return await asyncio.shield(self._looking)

    async def settle(self) -> None:
        """Wait for the look under way: it would take the first results of the batch to come."""
        if self._looking is not None:
            await self._looking

    def _cut(self, item: GenerationRequest) -> GenerationRequest:
        length = self._lengths[item.rollout_id]
        sampling = replace(item.sampling, max_completion_length=length, stop_token_ids=())
        return replace(item, sampling=sampling)


@dataclass(frozen=True)
class _Pair:
    generator: RayGenerator
    reward: RayAnnotator


async def _measure(config: RunConfig, lengths: Sequence[int], repeats: int) -> list[dict[str, Batch]]:
    prepared = prepare(config)
    own = None if ray.is_initialized() else OwnRay(4, config.ray.object_store_mb * 2**20, num_gpus=0)
    try:
        # Only a generator that is told so looks for chunks: those that do not send them are others.
        pairs = {chunks: await _start(config, chunks) for chunks in (False, True)}
        rounds = []
        for number in range(repeats + 1):
            tell(number, repeats)
            order = np.random.default_rng(number).permutation(lengths).tolist()
            found: dict[str, Batch] = {}
            for granularity in GRANULARITIES[:: 1 if number % 2 else -1]:
                fusion = replace(config.fusion, granularity=granularity)
                own = replace(config, fusion=fusion, seed=config.seed + number)
                found[granularity] = await _batch(own, prepared, pairs[granularity == CHUNK], order)
            rounds.append(found)
        for pair in pairs.values():
            await pair.generator.close()
            await pair.reward.close()
        return rounds[1:]
    finally:
        if own is not None:
            own.stop()


async def _start(config: RunConfig, chunks: bool) -> _Pair:
    """A generator and a reward worker, on a core each where there are two."""
    chunk_tokens, cache_tokens = (config.fusion.chunk_tokens, config.fusion.cache_tokens) if chunks else (0, 0)
    generator = RayGenerator(
        GeneratorSpec("generator-0", config.generator, config.model, "ray", config.weights, chunk_tokens)
    )
    spec = RewardSpec(config.reward, config.task, config.model, config.generator.max_completion_length, cache_tokens)
    reward = RayAnnotator(spec, 0, {"num_cpus": 1}, start_seconds=120.0)
    await asyncio.gather(generator.ready(), reward.ready())
    cores = sorted(available_cores())
    if len(cores) > 1:
        for part, core in ((generator.actor, cores[-1]), (reward.actor, cores[-2])):
            await ask("pinning", part.__ray_call__.remote(_pin, core), START_SECONDS, "keep_to")
    return _Pair(generator, reward)


def _pin(actor: Any, core: int) -> None:
    keep_to([core])


async def _batch(config: RunConfig, prepared: Prepared, pair: _Pair, lengths: Sequence[int]) -> Batch:
    """Dispatch one batch, collect and score it with the loops of a run."""
    state = build_state(config, print)
    state.died = _fail  # type: ignore[method-assign]
    tailed = _Tailed(pair.generator, lengths)
    replica = Replica(tailed, version=0)  # type: ignore[arg-type]
    state.replicas.append(replica)
    assembly = _Recording(state, lambda *_: None)
    assembly.scores = {}
    rewards = Rewards(state, assembly, [pair.reward])
    collector = Collector(state, assembly, [rewards])
    pulls: Any = SimpleNamespace(look=lambda: None, chosen=lambda choose, fits: choose())
    dispatcher = Dispatcher(state, prepared.task.train_source(config.seed), prepared.sampling, pulls)
    started = state.now()
    loops = [dispatcher.run(), collector.collect(replica), rewards.serve(pair.reward)]
    tasks = [asyncio.create_task(loop) for loop in loops]
    done = asyncio.create_task(state.batch.wait_for(lambda: len(assembly.scores) == config.batch_size))
    try:
        ended, _ = await asyncio.wait([*tasks, done], return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
    finally:
        for task in [*tasks, done]:
            task.cancel()
        await asyncio.gather(*tasks, done, return_exceptions=True)
    await tailed.settle()
    scores = assembly.scores
    infos = [info for info, _, _ in scores.values()]
    tokens = {r.rollout_id: r.response_ids.tobytes() for r in await _fetch(infos)}
    longest = max(infos, key=lambda info: info.response_length).rollout_id
    return Batch(
        seconds=max(at for _, _, at in scores.values()) - started,
        latencies={i: at - info.generated_at for i, (info, _, at) in scores.items()},
        rewards={i: float(result.reward or 0.0) for i, (_, result, _) in scores.items()},
        tokens=tokens,
        longest=longest,
        prefilled=state.prefill.early / max(1, state.prefill.scored),
    )


async def _fetch(infos: Sequence[RolloutInfo]) -> list[Rollout]:
    addresses, references = addressed([info.payload for info in infos])
    answers = (ask("the object store", reference, LONG_SECONDS, "fetch") for reference in references)
    return resolved(addresses, await asyncio.gather(*answers))


def _fail(replica: Replica, error: ReplicaError) -> None:
    raise error


def _percentile(percent: float) -> Callable[[Batch], float]:
    return lambda batch: float(np.percentile(list(batch.latencies.values()), percent))


# Of the rollouts of one batch.
LATENCIES: dict[str, Callable[[Batch], float]] = {
    "mean": lambda batch: fmean(batch.latencies.values()),
    "median": _percentile(50),
    "95th percentile": _percentile(95),
    "longest response": lambda batch: batch.latencies[batch.longest],
}


def _report(rounds: Sequence[dict[str, Batch]]) -> dict[str, Any]:
    seconds = {name: spread([r[name].seconds for r in rounds]) for name in GRANULARITIES}
    show("First prompt to last score of a batch", seconds, "s")
    latencies = {
        what: {name: spread([figure(r[name]) for r in rounds]) for name in GRANULARITIES}
        for what, figure in LATENCIES.items()
    }
    for what, rows in latencies.items():
        show(f"Last token to score, {what}", rows, "s")
    ratios = {
        f"batch / {name}, seconds": spread([r["batch"].seconds / r[name].seconds for r in rounds])
        for name in GRANULARITIES[1:]
    }
    for what, figure in LATENCIES.items():
        ratios[f"chunk / rollout, latency, {what}"] = spread([figure(r[CHUNK]) / figure(r["rollout"]) for r in rounds])
    show("Ratios, each of one round", ratios, "")
    same = [
        abs(r[name].rewards[i] - r["batch"].rewards[i])
        for r in rounds
        for name in GRANULARITIES[1:]
        for i in r["batch"].rewards
        if r[name].tokens[i] == r["batch"].tokens[i]
    ]
    difference, prefilled = max(same, default=math.nan), [r[CHUNK].prefilled for r in rounds]
    print(f"Largest difference of a reward between granularities, over {len(same)} equal rollouts: {difference:.2g}")
    print(f"Read before its end, with chunk: {100 * float(np.median(prefilled)):.0f}% of the reward model's tokens")
    return {
        "seconds": seconds,
        "latencies": latencies,
        "ratios": ratios,
        "reward_difference": difference,
        "rewards_compared": len(same),
        "prefilled_fraction": spread(prefilled),
    }
