"""One vLLM replica takes weights from a learner's sender, in flight: the pause of each load, the memory that each
process takes for it, and whether the engine then computes what the learner does.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
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

from asyncrlhf.actors.build_generator import build_worker
from asyncrlhf.actors.worker import GeneratorSpec
from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.engines.engine import named_weights
from asyncrlhf.engines.generator_config import GeneratorConfig, VllmConfig
from asyncrlhf.models.checkpoint_folder import load_tokenizer
from asyncrlhf.transport.build_transport import build_receiver, build_sender
from asyncrlhf.transport.protocol import worker_name
from asyncrlhf.transport.weights_config import WeightsConfig
from asyncrlhf.types import GenerationRequest, Prompt, SamplingParams

# SmolLM2-135M but for its 9 heads and 3 of keys, which two workers cannot share.
SHAPES = {
    "135m": dict(hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=8,
                 num_key_value_heads=4, head_dim=64, vocab_size=49152, tie_word_embeddings=True),
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


def serve(pipe: Connection, size: str, settings: dict[str, WeightsConfig]) -> None:
    """The learner's side, in a process of its own: one model, and a sender for each transport."""
    torch.set_num_threads(1)
    model = make_model(size)
    senders = {name: build_sender(weights, "ray", named_weights(model)) for name, weights in settings.items()}
    pool, sending = ThreadPoolExecutor(1), None
    sizes = next(iter(senders.values())).manifest.bucket_bytes
    pipe.send(({name: sender.listen("127.0.0.1") for name, sender in senders.items()}, sum(sizes), max(sizes)))
    while (order := pipe.recv()) is not None:
        what, transport, argument = order
        sender = senders.get(transport)
        if what == "connect":
            sending = pool.submit(sender.connect, "", *argument)
            pipe.send(None)
        elif what == "move":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1 + MOVED * torch.rand(()).item()).add_(MOVED * parameter.abs().mean())
            sender.snapshot(argument, named_weights(model))
            pipe.send((sender.ticket(), own_scores(model)))
        elif what == "transfer":
            sending = pool.submit(sender.transfer, argument)
            pipe.send(None)
        elif what == "done":
            pipe.send(_outcome(sending))
    for sender in senders.values():
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
    """A replica's worker as its actor drives it, and the senders' process. Way ``staged``: the replica's own process
    holds the whole version and hands it to vLLM's workers, as it does for the transports that have no stream."""

    def __init__(self, folder: str, size: str, workers: int, dtype: str, bucket_mb: float) -> None:
        self.settings = {
            name: WeightsConfig(transport=name, checksum=False, bucket_mb=bucket_mb)
            for name in ("collective", "shared_memory")
        }
        own = VllmConfig(
            engine_kwargs={"block_size": 32},
            kv_cache_gb=0.2,
            max_model_len=256,
            tensor_parallel_size=workers,
            dtype=dtype,
        )
        generator = GeneratorConfig(engine="vllm", slots=8, threads=0, vllm=own, ignore_eos=True)
        model, weights = ModelConfig(path=folder, dtype=dtype), self.settings["collective"]
        others = children()
        self.worker = build_worker(GeneratorSpec(NAME, generator, model, "ray", weights))
        self.workers = sorted(children() - others)
        self.staging = build_receiver(self.settings["shared_memory"], "ray")
        self.members = [worker_name(NAME, i) for i in range(workers)]
        self.epoch = self.next = 0
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.sender = context.Process(target=serve, args=(theirs, size, self.settings), daemon=True)
        self.sender.start()
        self.endpoints, self.bytes, self.largest_bucket = self.pipe.recv()

    def ask(self, what: str, transport: str = "", argument: Any = None) -> Any:
        self.pipe.send((what, transport, argument))
        return self.pipe.recv()

    def join(self, transport: str) -> None:
        """Have the workers enter a group with the sender of ``transport``."""
        self.epoch += 1
        self.worker.direct = self.settings[transport]
        self.ask("connect", transport, (self.members, self.epoch))
        self.worker.connect(self.endpoints[transport], 1, len(self.members) + 1, self.epoch)
        assert self.ask("done") == ""

    def keep_busy(self) -> None:
        while len(self.worker.engine.in_flight()) < 8:
            prompt = np.random.default_rng(self.next).integers(3, 120, 8)
            sampling = SamplingParams(max_completion_length=200)
            self.worker.submit([GenerationRequest(self.next, 0, Prompt("", "", prompt), self.next, sampling)])
            self.next += 1

    def processes(self) -> list[int]:
        return [os.getpid(), *(pid for pid in self.workers if anonymous(pid) > 50 << 20)]

    def update(self, version: int, way: str, *, watch: bool) -> dict[str, Any]:
        """One version, with sequences in flight; ``pause``: seconds between two steps; ``cpu``: processor seconds that
        the replica's processes and the sender's took in it."""
        self.keep_busy()
        for _ in range(2):
            self.worker.step()
        transport = "shared_memory" if way == "staged" else way
        if way != "staged" and not self.epoch:  # as in a run: a group lasts until a member changes
            self.join(way)
        ticket, expected = self.ask("move", transport, version)
        processes = self.processes()
        held = self.staging.receive(ticket) if way == "staged" else None
        memory = Memory(processes) if watch else None
        before, started = processor_seconds([*processes, self.sender.pid]), time.perf_counter()
        if held is not None:
            self.worker.engine.load_weights(version, held, "keep")
        else:
            self.ask("transfer", transport, ticket)
            self.worker.receive(ticket)
            self.worker.load(version, "keep")
        pause = time.perf_counter() - started
        cpu = processor_seconds([*processes, self.sender.pid]) - before
        growth = memory.growth() if memory is not None else {}
        assert held is not None or self.ask("done") == ""
        apart = max(float(np.abs(a - b).max()) for a, b in zip(expected, self.worker.score(PROBE), strict=True))
        grown = [round(g / 1e6, 1) for g in growth.values()]
        return {"pause": round(pause, 3), "cpu": round(cpu, 2), "audit": apart, "growth_mb": grown}

    def lose_a_worker(self, version: int) -> tuple[str, str]:
        """Kill the last worker at its second bucket; what the replica and what the sender say then."""
        self.join("collective")
        self.worker.engine._core._llm.collective_rpc(die_at_second_bucket)
        ticket, _ = self.ask("move", "collective", version)
        self.ask("transfer", "collective", ticket)
        self.worker.receive(ticket)
        try:
            self.worker.load(version, "keep")
            told = ""
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
        return told, self.ask("done")

    def close(self) -> None:
        self.pipe.send(None)
        self.sender.join(10)
        self.worker.close()


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def processor_seconds(processes: list[int]) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in processes]
    return sum(t.user + t.system for t in times)


def die_at_second_bucket(worker: Any) -> None:
    """Runs in vLLM's workers."""
    inner, seen = worker.worker, []

    def update_weights(info: Any) -> None:
        seen.append(1)
        if len(seen) == 2 and inner.rank > 0:
            os.kill(os.getpid(), signal.SIGKILL)
        type(inner).update_weights(inner, info)

    inner.update_weights = update_weights


def largest(rows: list[list[float]]) -> list[float]:
    """Of each process."""
    return [max(column) for column in zip(*rows, strict=True)]


def summary(made: Replica, rows: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The first round warms up; pauses and processor seconds are medians, growth and audit the largest."""
    later = {way: of[1:] or of for way, of in rows.items()}
    return {
        "megabytes": round(made.bytes / 1e6, 1),
        "largest_bucket_mb": round(made.largest_bucket / 1e6, 1),
        "workers": len(made.members),
        "versions": sum(map(len, rows.values())),
        "in_flight": len(made.worker.engine.in_flight()),
        "audit_largest": max(row["audit"] for of in rows.values() for row in of),
        "pause_seconds": {way: [row["pause"] for row in of] for way, of in later.items()},
        "pause_median": {way: median(row["pause"] for row in of) for way, of in later.items()},
        "cpu_median": {way: median(row["cpu"] for row in of) for way, of in later.items()},
        "growth_mb": {way: largest([row["growth_mb"] for row in of if row["growth_mb"]]) for way, of in later.items()},
    }  # fmt: skip


def measure(arguments: argparse.Namespace) -> None:
    rows: dict[str, list[dict[str, Any]]] = {way: [] for way in arguments.ways.split(",")}
    version = 0
    with TemporaryDirectory() as folder:
        make_model(arguments.size).to(getattr(torch, arguments.dtype)).save_pretrained(folder)
        load_tokenizer(ModelConfig()).save_pretrained(folder)
        given = (folder, arguments.size, arguments.workers, arguments.dtype, arguments.bucket_mb)
        replicas = {way: Replica(*given) for way in rows}
        for round_ in range(arguments.rounds):
            for way, of in rows.items():
                version += 1
                of.append(replicas[way].update(version, way, watch=round_ >= arguments.rounds - arguments.watched))
                print(way, version, of[-1], flush=True)
            arguments.out.write_text(json.dumps(summary(replicas[way], rows), indent=1) + "\n")
        if arguments.kill:
            print("killed:", replicas["collective"].lose_a_worker(version + 1), flush=True)
        for replica_ in replicas.values():
            replica_.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SHAPES, default="135m")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--ways", default="staged,collective,shared_memory", help="alternated, by commas")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--bucket-mb", type=float, default=32.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--watched", type=int, default=7, help="of the last rounds: their memory is looked at")
    parser.add_argument("--kill", action="store_true", help="at last kill a worker in the middle of a load")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("result.json"))
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
