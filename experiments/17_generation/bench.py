"""Our vLLM replica in its Ray actor against bare ``LLM.generate``: the same prompts, settings and threads."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray

from asyncrlhf.actors.worker import GeneratorSpec
from asyncrlhf.bench.measure import QUIET, show, spread, tell, write
from asyncrlhf.cluster.own_ray import OwnRay
from asyncrlhf.cluster.ray_handles import RayGenerator
from asyncrlhf.config.compose import load_config
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.engines.vllm.core import engine_arguments, sampling_arguments
from asyncrlhf.errors import AsyncRLHFError, ConfigError
from asyncrlhf.orchestrator.rollouts.dispatch import request_seed
from asyncrlhf.orchestrator.run import Prepared, prepare
from asyncrlhf.types import GenerationRequest

SETTING = [
    *QUIET,
    "model=smollm2",
    "task=reasoning_gym",
    "generator=vllm",
    "generator.slots=64",
    "generator.max_completion_length=32",
    "generator.ignore_eos=true",
    "generator.vllm.max_model_len=512",
    "generator.vllm.gpu_memory_utilization=0.4",  # on a GPU both sides share it
]
# The sampled token's log-prob and a seed a request: what RLHF asks for beyond plain text.
EXTRAS = ("logprobs", "seed")
SIDES = ("asyncrlhf", "LLM.generate", "LLM.generate, one process", "LLM.generate, plain")


def run(arguments: Sequence[str]) -> dict[str, Any]:
    """``--repeats`` rounds of each side in turn, in an order that is turned round every time, on prompts that no round
    before had; the first round of each warms up and is left out. Other arguments are overrides, ``model=...`` among
    them. vLLM's default is a process for its core beside the caller's; on few cores the two get in each other's way,
    so that it is also measured with both in one process, as ours. The plain side is asked neither for log-probs nor for
    draws that depend on a seed of the request's own.
    """
    parser = argparse.ArgumentParser(prog="asyncrlhf bench generation", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=128, help="requests of a round, generator.slots at once")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="CPU threads of either side")
    parser.add_argument("--out", type=Path, default=None)
    options, overrides = parser.parse_known_args(list(arguments))
    config = load_config([*SETTING, f"generator.threads={options.threads}", *overrides])
    if config.generator.engine != "vllm":
        raise ConfigError(f"generator.engine={config.generator.engine} is not measured here; allowed: vllm.")
    rates: dict[str, list[float]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare(load_config([*SETTING, f"run_dir={folder}/run", *overrides]))
        rounds = work_rounds(config, prepared, options.prompts)
        with bare_process(config) as bare, bare_process(config, one=True) as single, our_replica(config) as ours:
            measure = {
                "asyncrlhf": ours,
                "LLM.generate": lambda items: bare(items, plain=False),
                "LLM.generate, one process": lambda items: single(items, plain=False),
                "LLM.generate, plain": lambda items: bare(items, plain=True),
            }
            for number in range(options.repeats + 1):
                tell(number, options.repeats)
                items = next(rounds)
                for side in SIDES[:: 1 if number % 2 else -1]:
                    rate = measure[side](items)
                    if number:
                        rates[side].append(rate)
    rows = {side: spread(values) for side, values in rates.items()}
    show(f"{options.prompts} responses a round, {config.generator.slots} in flight", rows, "tokens/s")
    ours_rates = rates["asyncrlhf"]
    ratios = {
        f"asyncrlhf / {side}": spread([a / b for a, b in zip(ours_rates, rates[side], strict=True)])
        for side in SIDES[1:]
    }
    show("Ratio, each of one round", ratios, "")
    facts = {"prompts": options.prompts, "threads": options.threads, "overrides": [*SETTING, *overrides]}
    return write({"tokens_per_second": rows, "ratios": ratios, **facts}, options.out)


def work_rounds(config: RunConfig, prepared: Prepared, size: int) -> Iterator[list[GenerationRequest]]:
    """Rounds of ``size`` requests under ids of their own, in groups of siblings as a run asks for them."""
    source = prepared.task.train_source(config.seed)
    issued = 0
    while True:
        items: list[GenerationRequest] = []
        while len(items) < size:
            prompt = source.next()
            for _ in range(min(config.num_generations, size - len(items))):
                seed = request_seed(config.seed, issued)
                group = issued // config.num_generations
                request = GenerationRequest(issued, group, prompt, seed, prepared.sampling)
                items.append(request)
                issued += 1
        yield items


@contextmanager
def our_replica(config: RunConfig) -> Iterator[Any]:
    """Tokens a second of a round on the replica of a run: its actor, through its handle."""
    own = None
    if not ray.is_initialized():
        gpus = None if config.generator.gpus else 0
        cpus = max(config.generator.threads, os.cpu_count() or 1)
        own = OwnRay(cpus, config.ray.object_store_mb * 2**20, forks=gpus == 0, num_gpus=gpus)
    loop = asyncio.new_event_loop()
    try:
        generator = RayGenerator(GeneratorSpec("generator-0", config.generator, config.model, "ray", config.weights))
        loop.run_until_complete(generator.ready())
        yield lambda items: loop.run_until_complete(_generate(generator, items))
        loop.run_until_complete(generator.close())
    finally:
        loop.close()
        if own is not None:
            own.stop()


async def _generate(generator: RayGenerator, items: Sequence[GenerationRequest]) -> float:
    """Keep every slot busy: what finished is collected, and as many new requests are sent."""
    before = (await generator.collect()).tokens
    waiting, in_flight, done, tokens = list(items), 0, 0, before
    started = time.perf_counter()
    while done < len(items):
        room = generator.slots - in_flight
        if waiting and room:
            fresh, waiting = waiting[:room], waiting[room:]
            await generator.submit(fresh)
            in_flight += len(fresh)
        collected = await generator.collect()
        if collected.failed:
            raise AsyncRLHFError(f"A request failed on our side: {collected.failed[0].error}")
        in_flight -= len(collected.finished)
        done += len(collected.finished)
        tokens = collected.tokens
    return (tokens - before) / (time.perf_counter() - started)


@contextmanager
def bare_process(config: RunConfig, *, one: bool = False) -> Iterator[Any]:
    """Tokens a second of a round on vLLM's own ``LLM``, in a process with the same engine settings and threads; with
    ``one`` its core is not a process of its own."""
    arguments = engine_arguments(config.generator, config.model)
    del arguments["weight_transfer_config"]  # ours alone receives weights
    threads = str(config.generator.threads)
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    if one:
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    environment.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    environment.setdefault("VLLM_NO_USAGE_STATS", "1")
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("bare_vllm.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        )

        def ask(message: dict[str, Any]) -> dict[str, Any]:
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(json.dumps(message) + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
            except BrokenPipeError:
                line = ""
            if not line:
                errors.seek(0)
                lines = errors.read().strip().splitlines() or ["it ended without a word"]
                raise AsyncRLHFError(f"Bare vLLM failed: {lines[-1]}")
            answer: dict[str, Any] = json.loads(line)
            return answer

        def measure(items: Sequence[GenerationRequest], plain: bool) -> float:
            requests = [_bare_request(item, plain) for item in items]
            answer = ask({"requests": requests})
            return float(answer["tokens"] / answer["seconds"])

        try:
            ask(arguments)
            yield measure
        finally:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it ended before it had read everything
                process.stdin.close()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _bare_request(request: GenerationRequest, plain: bool) -> dict[str, Any]:
    sampling = sampling_arguments(request)
    if plain:
        sampling = {key: value for key, value in sampling.items() if key not in EXTRAS}
    return {"prompt_ids": request.prompt_ids.tolist(), "sampling": sampling}
