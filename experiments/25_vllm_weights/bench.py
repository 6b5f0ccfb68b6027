"""One vLLM replica takes weights from a learner's sender, in flight: the pause of each load, the memory that each
process takes for it, and whether the engine then computes what the learner does.

Runs with the package of another commit, too (``PYTHONPATH``): there the replica's own process receives.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil
import torch

from asyncrlhf.actors import worker as replica
from asyncrlhf.data.checkpoint_folder import load_tokenizer
from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.engines.engine import named_weights
from asyncrlhf.engines.generator_config import GeneratorConfig, VllmConfig
from asyncrlhf.transport.build_transport import build_sender
from asyncrlhf.transport.weights_config import WeightsConfig
from asyncrlhf.types import GenerationRequest, Prompt, SamplingParams

# SmolLM2-135M but for its 9 heads and 3 of keys, which two workers cannot share.
SHAPES = {
    "135m": dict(hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=10,
                 num_key_value_heads=2, head_dim=64, vocab_size=49152, tie_word_embeddings=True),
    "tiny": dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=32, vocab_size=128),
}  # fmt: skip
NAME, MOVED = "generator-0", 0.02
PROBE = [np.random.default_rng(seed).integers(3, 120, 40) for seed in range(4)]


def make_model(size: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(max_position_embeddings=256, **SHAPES[size])).eval()


@torch.no_grad()
def own_scores(model: Any) -> list[np.ndarray]:
    found = []
    for text in PROBE:
        logits = model(torch.from_numpy(text)[None]).logits[0]
        found.append(torch.log_softmax(logits[:-1], -1).gather(1, torch.from_numpy(text)[1:, None])[:, 0].numpy())
    return found


def serve(pipe: Connection, size: str, weights: WeightsConfig) -> None:
    """The learner's side, in a process of its own."""
    torch.set_num_threads(1)
    model = make_model(size)
    sender = build_sender(weights, "ray", named_weights(model))
    pool, sending = ThreadPoolExecutor(1), None
    pipe.send((sender.listen("127.0.0.1"), sum(sender.manifest.bucket_bytes), max(sender.manifest.bucket_bytes)))
    while (order := pipe.recv()) is not None:
        what, argument = order
        if what == "connect":
            sending = pool.submit(sender.connect, "", *argument)
            pipe.send(None)
        elif what == "move":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(MOVED * parameter.abs().mean() * torch.randn(parameter.shape))
            sender.snapshot(argument, named_weights(model))
            pipe.send((sender.ticket(), own_scores(model)))
        elif what == "transfer":
            sending = pool.submit(sender.transfer, argument)
            pipe.send(None)
        elif what == "done":
            pipe.send(_outcome(sending))
    sender.close()


def _outcome(sending: Any) -> str:
    try:
        sending.result()
    except Exception as error:
        return str(error)
    return ""


class Memory(threading.Thread):
    """The largest RssAnon of some processes, by process id, in bytes, until it is ended."""

    def __init__(self, processes: list[int]) -> None:
        super().__init__(daemon=True)
        self.before = {pid: anonymous(pid) for pid in processes}
        self.most = dict(self.before)
        self._ended = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._ended.wait(0.002):
            for pid in self.most:
                self.most[pid] = max(self.most[pid], anonymous(pid))

    def growth(self) -> dict[int, int]:
        self._ended.set()
        self.join()
        return {pid: self.most[pid] - self.before[pid] for pid in self.most}


def anonymous(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("RssAnon"))


class Replica:
    """A replica's worker as its actor drives it, and the sender's process."""

    def __init__(self, folder: str, size: str, workers: int, weights: WeightsConfig, dtype: str) -> None:
        own = VllmConfig(block_size=32, kv_cache_gb=0.2, max_model_len=256, tensor_parallel_size=workers, dtype=dtype)
        generator = GeneratorConfig(engine="vllm", slots=8, threads=0, vllm=own, ignore_eos=True)
        spec = replica.GeneratorSpec(NAME, generator, ModelConfig(path=folder, dtype=dtype), "ray", weights)
        self.worker = replica.build_worker(spec)
        self.direct = getattr(self.worker, "direct", None) is not None
        self.size, self.workers = size, workers
        self._next, self._epoch = 0, 0
        self.connect(weights)

    def connect(self, weights: WeightsConfig) -> None:
        """A learner's sender in a process of its own, and the replica in a group with it."""
        if self.direct:
            self.worker.direct = weights
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.sender = context.Process(target=serve, args=(theirs, self.size, weights), daemon=True)
        self.sender.start()
        self.endpoint, self.bytes, self.largest_bucket = self.pipe.recv()
        names = [f"{NAME}/{i}" for i in range(self.workers)] if self.direct else [NAME]
        self._epoch += 1
        self.ask("connect", (names, self._epoch))
        self.worker.connect(self.endpoint, 1, len(names) + 1, self._epoch)
        assert self.ask("done") == ""

    def ask(self, what: str, argument: Any = None) -> Any:
        self.pipe.send((what, argument))
        return self.pipe.recv()

    def keep_busy(self) -> None:
        while len(self.worker.engine.in_flight()) < 8:
            prompt = np.random.default_rng(self._next).integers(3, 120, 8)
            sampling = SamplingParams(max_completion_length=200)
            self.worker.submit([GenerationRequest(self._next, 0, Prompt("", "", prompt), self._next, sampling)])
            self._next += 1

    def processes(self) -> list[int]:
        workers = [p.pid for p in psutil.Process().children(recursive=True) if p.pid != self.sender.pid]
        return [os.getpid(), *(pid for pid in workers if anonymous(pid) > 50 << 20)]

    def update(self, version: int, *, watch: bool = True) -> dict[str, Any]:
        """One version, with sequences in flight; ``pause``: seconds between two steps."""
        self.keep_busy()
        for _ in range(3):
            self.worker.step()
        ticket, expected = self.ask("move", version)
        memory = Memory(self.processes()) if watch else None
        self.ask("transfer", ticket)
        if not self.direct:
            self.worker.receive(ticket)
            assert self.ask("done") == ""
            staged = Memory(self.processes()) if watch else None
            started = time.perf_counter()
            self.worker.load(version, "keep")
            pause = time.perf_counter() - started
            if staged is not None:
                staged.growth()
        else:
            self.worker.receive(ticket)
            started = time.perf_counter()
            self.worker.load(version, "keep")
            pause = time.perf_counter() - started
            assert self.ask("done") == ""
        growth = memory.growth() if memory is not None else {}
        apart = max(float(np.abs(a - b).max()) for a, b in zip(expected, self.worker.score(PROBE), strict=True))
        return {"pause": pause, "audit": apart, "growth_mb": [round(g / 1e6, 1) for g in growth.values()]}

    def disconnect(self) -> None:
        self.pipe.send(None)
        self.sender.join(10)

    def lose_a_worker(self, version: int) -> tuple[str, str]:
        """Kill the last worker at its second bucket; what the replica and what the sender say then."""
        self.worker.engine._core._llm.collective_rpc(die_at_second_bucket)
        ticket, _ = self.ask("move", version)
        self.ask("transfer", ticket)
        self.worker.receive(ticket)
        try:
            self.worker.load(version, "keep")
            told = ""
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
        return told, self.ask("done")


def die_at_second_bucket(worker: Any) -> None:
    """Runs in vLLM's workers."""
    inner, seen = worker.worker, []

    def update_weights(info: Any) -> None:
        seen.append(1)
        if len(seen) == 2 and inner.rank > 0:
            os.kill(os.getpid(), signal.SIGKILL)
        type(inner).update_weights(inner, info)

    inner.update_weights = update_weights


def rows_of(made: Replica, arguments: argparse.Namespace, transport: str) -> dict[str, Any]:
    rows = []
    for version in range(1, arguments.updates + 1):
        rows.append(made.update(version, watch=not arguments.blind))
        print(f"{transport}, version {version}: {rows[-1]}", flush=True)
    return {
        "workers": arguments.workers, "transport": transport, "direct": made.direct,
        "megabytes": round(made.bytes / 1e6, 1), "largest_bucket_mb": round(made.largest_bucket / 1e6, 1),
        "in_flight": len(made.worker.engine.in_flight()), "pause_seconds": [round(row["pause"], 3) for row in rows],
        "pause_median": round(median(row["pause"] for row in rows), 3),
        "audit_largest": max(row["audit"] for row in rows),
        "growth_mb": [max(column) for column in zip(*(row["growth_mb"] for row in rows[1:]), strict=False)],
    }  # fmt: skip


def obey(made: Replica) -> None:
    """One update a line of standard input, for :mod:`alternate`."""
    print("ready", flush=True)
    for version, order in enumerate(sys.stdin, start=1):
        row = made.update(version, watch=order.strip() == "watch")
        facts = {"megabytes": made.bytes / 1e6, "largest_bucket_mb": made.largest_bucket / 1e6}
        print(json.dumps(row | facts), flush=True)
    made.disconnect()
    made.worker.close()


def measure(arguments: argparse.Namespace) -> None:
    def settings(transport: str) -> WeightsConfig:
        return WeightsConfig(transport=transport, checksum=False, bucket_mb=arguments.bucket_mb)

    transports = arguments.transports.split(",")
    with TemporaryDirectory() as folder:
        make_model(arguments.size).to(getattr(torch, arguments.dtype)).save_pretrained(folder)
        load_tokenizer(ModelConfig()).save_pretrained(folder)
        made = Replica(folder, arguments.size, arguments.workers, settings(transports[0]), arguments.dtype)
        if arguments.steer:
            obey(made)
            return
        for place, transport in enumerate(transports):
            if place:
                made.disconnect()
                made.connect(settings(transport))
            print(json.dumps(rows_of(made, arguments, transport)), flush=True)
        if arguments.kill:
            print(json.dumps({"killed": made.lose_a_worker(arguments.updates + 1)}), flush=True)
        made.disconnect()
        made.worker.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SHAPES, default="135m")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--transports", default="collective", help="one after the other, by commas")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--bucket-mb", type=float, default=32.0)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--blind", action="store_true", help="without a look at the memory, which takes time")
    parser.add_argument("--kill", action="store_true", help="at last kill a worker in the middle of a load")
    parser.add_argument("--steer", action="store_true", help="one update a line of standard input")
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
