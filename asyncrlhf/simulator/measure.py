"""Measures the costs of a run's parts on this machine, on the parts themselves: actors, engine and learner of a run,
one side at a time and then both at once. ``asyncrlhf profile`` writes it, ``simulate`` and ``plan`` read it."""

from __future__ import annotations

import asyncio
import platform
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncrlhf.actors.learner import LearnerWorker
from asyncrlhf.actors.worker import GeneratorWorker
from asyncrlhf.cluster.handles import LONG_SECONDS, GeneratorHandle, Runtime
from asyncrlhf.cluster.parts import build_runtime
from asyncrlhf.config.compose import load_config
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.errors import AsyncRLHFError
from asyncrlhf.models.checkpoint_folder import context_length
from asyncrlhf.orchestrator.rollouts.dispatch import request_seed
from asyncrlhf.orchestrator.run import Prepared, prepare
from asyncrlhf.planner.tables import Fitted, fit
from asyncrlhf.records.show.summary import git_state
from asyncrlhf.types import GenerationRequest, Prompt, RolloutInfo, SamplingParams
from asyncrlhf.validation import check

CERTAIN = 0.05  # of a median: half of its 95% interval, below which a figure counts as certain
LEAST, MOST = 5, 25  # rounds
NEWS_SECONDS = 10.0  # between two lines for who waits
LONGEST = 32  # tokens by which a sequence is continued
SCORED = 32  # rollouts of a large call of a service
# Each part's share of the time limit.
SHARES = {"decode": 0.45, "train": 0.25, "publish": 0.1, "score": 0.05, "both": 0.15}
# Settings irrelevant to the measurement: no display, audit or evaluation; the schedule's rates do not matter.
QUIET = ("logging=quiet", "logging.wandb=disabled", "eval_every=0", "checkpoint.every=0", "checkpoint.at_end=false",
         "weights.audit_every=0", "task.heldout_size=8", "generator.virtual_step_seconds=0",
         "learner.virtual_step_seconds=0")  # fmt: skip
Sample = tuple[float, ...]
Cases = Mapping[Sample, Callable[[], Awaitable[Sample]]]


@dataclass(frozen=True)
class Measured:
    """``costs``: straight lines through the tables. ``tables``: by name, columns of equal length: the varied
    quantities, and median, quartiles and repeats of the seconds. ``interference``: the factors by which the learner and
    the generators are slower while the other side works. ``misfit``: by table, the largest relative distance of the
    line from a median."""

    costs: Fitted
    tables: Mapping[str, Mapping[str, list[float]]]
    interference: tuple[float, float]
    misfit: Mapping[str, float]
    prompt: float  # mean tokens of the run's own prompts
    lengths: Sequence[int]  # tokens of responses to them
    start_seconds: float
    publish_bytes: int

    def facts(self) -> dict[str, Any]:
        """The entries of a profile's file other than the costs."""
        return {
            "tables": self.tables,
            "misfit": self.misfit,
            "interference": {"learner": self.interference[0], "generator": self.interference[1]},
            "lengths": {"prompt": self.prompt, "responses": list(self.lengths)},
            "start_seconds": self.start_seconds,
            "publish_bytes": self.publish_bytes,
        }


def table(names: Sequence[str], found: Mapping[Sample, Sequence[float]]) -> dict[str, list[float]]:
    """Columns of a table from samples by the varied quantities (``names``)."""
    columns: dict[str, list[float]] = {name: [key[i] for key in found] for i, name in enumerate(names)}
    quartiles = [np.quantile(samples, (0.25, 0.5, 0.75)).tolist() for samples in found.values()]
    for i, name in enumerate(("lower", "seconds", "upper")):
        columns[name] = [values[i] for values in quartiles]
    return columns | {"repeats": [len(samples) for samples in found.values()]}


def line(rows: Sequence[Sample], seconds: Sequence[float]) -> tuple[tuple[float, ...], float]:
    """Non-negative coefficients with the least relative errors, and the largest of these errors. A value far below the
    others (a difference lost in noise) weighs at most as much as a tenth of their median."""
    given, wanted = np.asarray(rows, float), np.asarray(seconds, float)
    scale = np.maximum(wanted, 0.1 * float(np.median(wanted)) or 1.0)
    found = fit(given / scale[:, None], wanted / scale)
    return found, float(np.max(np.abs(given @ np.asarray(found) - wanted) / scale))


def certain(samples: Sequence[float]) -> bool:
    """Whether the median's 95% interval (of a box plot's notch) is within ``CERTAIN`` of it on either side."""
    lower, median, upper = np.quantile(samples, (0.25, 0.5, 0.75))
    return bool(1.57 * (upper - lower) / len(samples) ** 0.5 <= CERTAIN * abs(median))


async def repeated(what: str, cases: Cases, seconds: float) -> dict[Sample, list[Sample]]:
    """Samples of each case: one a round, after a round that warms up, until the first figure of each is certain or the
    time is over; ``LEAST`` rounds at least, unless a round alone takes longer than the limit."""
    clock = asyncio.get_running_loop().time
    began = said = clock()
    say(f"{what}: {len(cases)} cases, {seconds:.0f} s at most")
    found: dict[Sample, list[Sample]] = {key: [] for key in cases}
    for number in range(MOST + 1):
        for done, (key, case) in enumerate(cases.items()):
            sample = await case()
            if number:
                found[key].append(sample)
            if clock() - said > NEWS_SECONDS:
                said = clock()
                say(f"{what}: round {number}, {done + 1} of {len(cases)} cases")
        spent = clock() - began
        if number >= LEAST and all(certain([s[0] for s in samples]) for samples in found.values()):
            break
        if number >= 1 and spent > seconds and (number >= LEAST or spent > 2 * seconds):
            break
    return found


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


@dataclass
class Bench:
    """The parts of a run that has not begun."""

    config: RunConfig
    prepared: Prepared
    runtime: Runtime
    vocabulary: int
    ids: count[int] = field(default_factory=count)
    publish_bytes: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.config.seed)

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    @property
    def context(self) -> int:
        """Tokens of a whole sequence: those of the run's longest, at least a few, at most the model's context."""
        run = self.config.task.max_prompt_length + self.config.generator.max_completion_length
        most = self.config.generator.vllm.max_model_len or context_length(self.config.model)
        return min(max(run, 2 * LONGEST), most)

    @property
    def continued(self) -> tuple[int, int]:
        """Tokens of the short and of the long continuation whose seconds are compared."""
        longest = min(LONGEST, self.context // 2)
        return max(1, longest // 4), longest

    def prompt(self, tokens: int) -> Prompt:
        return Prompt("profile", "", self.rng.integers(self.vocabulary, size=tokens).astype(np.int64))

    async def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> tuple[float, list[RolloutInfo]]:
        """Seconds from the submission until all have ended, and a rollout of each prompt; equal ones are siblings."""
        generator, group, requests = self.runtime.generators[0], -1, []
        for place, prompt in enumerate(prompts):
            if not place or prompt is not prompts[place - 1]:
                group = next(self.ids)
            i = next(self.ids)
            requests.append(GenerationRequest(i, group, prompt, request_seed(self.config.seed, i), sampling))
        done: list[RolloutInfo] = []
        began = self.now()
        await generator.submit(requests)
        while len(done) < len(prompts):
            collected = await generator.collect()
            if collected.failed:
                raise AsyncRLHFError(f"profile: {generator.name} could not generate: {collected.failed[0].error}")
            done.extend(collected.finished)
        seconds = self.now() - began
        return seconds, sorted(done, key=lambda info: info.rollout_id)

    def exactly(self, tokens: int) -> SamplingParams:
        """Force responses of this many tokens."""
        return replace(self.prepared.sampling, max_completion_length=tokens, stop_token_ids=(), stop=())

    async def decode(self, running: int, prompt_tokens: int) -> Sample:
        """Seconds of one iteration of ``running`` sequences, from the difference of a long and a short continuation,
        and the mean context of these iterations; seconds of the whole short one, and its tokens."""
        seconds, tokens = [], []
        for length in self.continued:
            prompts = [self.prompt(prompt_tokens) for _ in range(running)]
            took, done = await self.generate(prompts, self.exactly(length))
            seconds.append(took)
            tokens.append(float(np.mean([info.response_length for info in done])))
        iteration = (seconds[1] - seconds[0]) / (tokens[1] - tokens[0])
        return iteration, prompt_tokens + sum(tokens) / 2, seconds[0], tokens[0]

    async def stock(self, prompt_tokens: int, length: int) -> list[RolloutInfo]:
        """A batch of rollouts of one length in whole groups, whose rewards have spread."""
        siblings = self.config.num_generations
        prompts = [self.prompt(prompt_tokens) for _ in range(self.config.batch_size // siblings)]
        _, done = await self.generate([p for p in prompts for _ in range(siblings)], self.exactly(length))
        return [replace(info, reward=float(i % 2)) for i, info in enumerate(done)]

    async def train(self, batch: Sequence[RolloutInfo]) -> Sample:
        """Seconds of a learner step; generators on its devices sleep meanwhile."""
        await self._sharing(GeneratorWorker.sleep)
        began = self.now()
        await self.runtime.learner.train(batch)
        seconds = self.now() - began
        await self._sharing(GeneratorWorker.wake)
        return (seconds,)

    async def _sharing(self, method: Callable[[GeneratorWorker], None]) -> None:
        names = self.runtime.sharing
        await asyncio.gather(*(g.call(LONG_SECONDS, method) for g in self.runtime.generators if g.name in names))

    async def publish(self, batch: Sequence[RolloutInfo] | None = None) -> Sample:
        """Seconds of the learner's stall, of the transfer and of the load, after a step on ``batch``."""
        learner, generators = self.runtime.learner, self.runtime.generators
        if batch is not None:
            await self.train(batch)
        offer = await learner.snapshot(None)
        began = self.now()
        ticket = await learner.call(LONG_SECONDS, LearnerWorker.ticket)
        received = [g.call(LONG_SECONDS, GeneratorWorker.receive, ticket) for g in generators]
        await asyncio.gather(learner.call(LONG_SECONDS, LearnerWorker.transfer, ticket), *received)
        there = self.now()
        await asyncio.gather(*(self._load(generator, ticket.version) for generator in generators))
        self.publish_bytes = sum(ticket.manifest.bucket_bytes)
        return offer.seconds, there - began, self.now() - there

    async def _load(self, generator: GeneratorHandle, version: int) -> None:
        await generator.call(LONG_SECONDS, GeneratorWorker.load, version, "keep")

    async def score(self, worker: Any, rollouts: Sequence[RolloutInfo], ticket: Any) -> Sample:
        began = self.now()
        await worker.annotate([info.payload for info in rollouts], ticket)
        return (self.now() - began,)

    async def both(self, batch: Sequence[RolloutInfo], running: int, prompt_tokens: int) -> tuple[float, float]:
        """Median seconds of a learner step and of an iteration while both sides are at work."""
        trained: list[float] = []
        decoded: list[float] = []

        async def keep_on(into: list[float], action: Callable[[], Awaitable[Sample]]) -> None:
            while min(len(trained), len(decoded)) < LEAST:
                into.append((await action())[0])

        decode = partial(self.decode, running, prompt_tokens)
        await asyncio.gather(keep_on(trained, partial(self.train, batch)), keep_on(decoded, decode))
        return float(np.median(trained)), float(np.median(decoded))


async def measure(
    config: RunConfig, prepared: Prepared, runtime: Runtime, seconds: float, *, together: bool = True
) -> Measured:
    """All figures of ``runtime``'s parts, which are started here and not closed. ``seconds``: the limit without the
    start; each part gets at least a few rounds. ``together``: the sides run in separate processes."""
    began = time.monotonic()
    say("start of the parts")
    await runtime.start()
    await runtime.connect(runtime.generators)
    bench = Bench(config, prepared, runtime, len(prepared.tokenizer))
    await bench.publish()
    started = time.monotonic() - began
    limit = {name: share * seconds for name, share in SHARES.items()}
    source, siblings = prepared.task.train_source(config.seed), config.num_generations
    own = [source.next() for _ in range(config.batch_size // siblings)]
    _, answers = await bench.generate([p for p in own for _ in range(siblings)], prepared.sampling)

    short, longest = bench.continued
    room = bench.context - longest
    prompts = sorted({min(8, room), (room + 1) // 2, room})
    slots = runtime.generators[0].slots
    sizes = sorted({min(slots, 4**i) for i in range(12)} | {slots // 2 or 1})
    grid: Cases = {(float(b), float(p)): partial(bench.decode, b, p) for b in sizes for p in prompts}
    decoded = await repeated("decoding", grid, limit["decode"])

    batches = [await bench.stock(prompts[0], short), full := await bench.stock(prompts[-1], longest)]
    if (half := len(full) // siblings // 2 * siblings) > 0:
        batches.append(full[:half])
    sums = [float(sum(info.tokens for info in batch)) for batch in batches]
    steps: Cases = {(n,): partial(bench.train, batch) for n, batch in zip(sums, batches, strict=True)}
    trained = await repeated("learner steps", steps, limit["train"])
    published = await repeated("publishing", {(): partial(bench.publish, batches[0])}, limit["publish"])

    scored: dict[str, dict[Sample, list[Sample]]] = {}
    for kind, workers in (("reward", runtime.rewards), ("reference", runtime.references), ("critic", runtime.critics)):
        if workers:
            ticket = await runtime.learner.call(LONG_SECONDS, LearnerWorker.critic_ticket) if kind == "critic" else None
            parts: Cases = {
                (float(n),): partial(bench.score, workers[0], full[:n], ticket) for n in {1, min(SCORED, len(full))}
            }
            scored[kind] = await repeated(f"the {kind}'s calls", parts, limit["score"])
    factors = (1.0, 1.0)
    if together and not runtime.sharing:
        say("both sides at once")
        alone = np.median(trained[(sums[1],)]), np.median([s[0] for s in decoded[(float(slots), float(prompts[-1]))]])
        beside = await bench.both(full, slots, prompts[-1])
        factors = tuple(max(1.0, float(b / a)) for a, b in zip(alone, beside, strict=True))  # type: ignore[assignment]
    lengths = [info.response_length for info in answers]
    mean_prompt = float(np.mean([info.prompt_length for info in answers]))
    costs, tables, misfit = lines(decoded, trained, published[()], scored)
    return Measured(costs, tables, factors, misfit, mean_prompt, lengths, started, bench.publish_bytes)


def lines(
    decoded: Mapping[Sample, Sequence[Sample]],
    trained: Mapping[Sample, Sequence[Sample]],
    published: Sequence[Sample],
    scored: Mapping[str, Mapping[Sample, Sequence[Sample]]],
) -> tuple[Fitted, dict[str, dict[str, list[float]]], dict[str, float]]:
    """Costs as straight lines through the medians, the tables themselves, and the misfit of each."""
    first = lambda samples: [sample[0] for sample in samples]  # noqa: E731
    tables, misfit = {}, {}
    by_context: dict[Sample, list[float]] = {
        (key[0], samples[0][1]): first(samples) for key, samples in decoded.items()
    }
    tables["decode"] = iterations = table(("running", "context"), by_context)
    if np.median(iterations["seconds"]) <= 0:
        raise AsyncRLHFError("profile: noise hides an iteration's seconds; allowed: more --seconds, a quieter machine.")
    rows = [(1.0, b, b * c) for b, c in by_context]
    decode, misfit["decode"] = line(rows, iterations["seconds"])
    base, each, token = decode
    starts: dict[Sample, list[float]] = {}
    for (running, prompt), samples in decoded.items():  # seconds of a short continuation without its iterations
        own = [base + running * (each + token * (prompt + tokens / 2)) for *_, tokens in samples]
        starts[running, prompt] = [s[2] - s[3] * one for s, one in zip(samples, own, strict=True)]
    tables["start"] = table(("sequences", "prompt"), starts)
    message, prefill = fit([(1.0, n * tokens) for n, tokens in starts], tables["start"]["seconds"])
    tables["train"] = table(("tokens",), {key: first(samples) for key, samples in trained.items()})
    train, misfit["train"] = line([(1.0, *key) for key in trained], tables["train"]["seconds"])
    score = {}
    for kind, calls in scored.items():
        name = f"score.{kind}"
        tables[name] = table(("rollouts",), {key: first(samples) for key, samples in calls.items()})
        (call, each), misfit[name] = line([(1.0, *key) for key in calls], tables[name]["seconds"])
        score[kind] = max(0.0, call - message), each  # a call and its answer are messages, too
    publish = [list(column) for column in zip(*published, strict=True)]
    for name, samples in zip(("snapshot", "transfer", "load"), publish, strict=True):
        tables[f"publish.{name}"] = table((), {(): samples})
    snapshot, transfer, load = (float(np.median(samples)) for samples in publish)
    names = ("decode", "prefill", "train", "score", "snapshot", "transfer", "load", "submit", "collect")
    costs = Fitted(
        decode_terms=decode,  # type: ignore[arg-type]
        train_terms=train,  # type: ignore[arg-type]
        prefill_token=prefill,
        score_terms=score,  # type: ignore[arg-type]
        snapshot=snapshot,
        transfer=transfer,
        load=load,
        submit=message / 2,
        collect=message / 2,
        sources=dict.fromkeys(names, "measured"),
    )
    return costs, tables, misfit


def measured(seconds: float, overrides: Sequence[str]) -> tuple[Fitted, dict[str, Any], dict[str, Any]]:
    """The costs, the conditions of the measurement, and the tables, of at most ``seconds`` without the parts' start."""
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
            return await measure(prepared.config, prepared, runtime, seconds, together=config.runtime == "ray")
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
