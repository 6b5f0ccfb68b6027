"""Weight publishes to replicas in processes of their own, beside one raw gloo broadcast of the same bytes."""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist

from asyncrlhf.bench.measure import tell
from asyncrlhf.transport.build_transport import build_receiver, build_sender
from asyncrlhf.transport.receiver import WeightReceiver
from asyncrlhf.transport.sender import WeightSender
from asyncrlhf.transport.weights_config import WeightsConfig
from asyncrlhf.validation import check, check_choice, check_range

TIMEOUT_SECONDS = 60.0
COMPUTE_TOKENS = 512  # of the compute beside a copy: far less than a real microbatch, which also runs backward
NORM = "model.norm.weight"
Round = Mapping[str, Mapping[str, float]]  # way to publish (and "raw") -> seconds by name


@dataclass(frozen=True)
class Shape:
    """A Llama with tied embeddings, as transformers' ``LlamaConfig`` names its sizes."""

    layers: int
    hidden: int
    intermediate: int
    key_value: int
    vocabulary: int

    def tensors(self) -> dict[str, torch.Tensor]:
        """Random float32 tensors with the names and shapes of the model."""
        hidden, wide, narrow = self.hidden, self.intermediate, self.key_value
        block = {
            "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (narrow, hidden),
            "self_attn.v_proj": (narrow, hidden), "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden), "mlp.down_proj": (hidden, wide),
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        }  # fmt: skip
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, hidden)}
        shapes |= {f"model.layers.{i}.{n}.weight": s for i in range(self.layers) for n, s in block.items()}
        shapes[NORM] = (hidden,)
        return {name: torch.randn(shape) for name, shape in shapes.items()}


@dataclass(frozen=True)
class Variant:
    """One way to publish. Checksums are switched on one sender, so that both ways share its memory."""

    transport: str
    checksum: bool = True

    @property
    def label(self) -> str:
        return f"{self.transport}{'' if self.checksum else ', no checksum'}"


def raw_group(store: dist.Store, rank: int, size: int, host: str) -> Any:
    """torch's own gloo group with its defaults, except for the network address."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=TIMEOUT_SECONDS)
    return dist.ProcessGroupGloo(store, rank, size, options)


def raw_broadcast(group: Any, flat: torch.Tensor) -> float:
    """Seconds of one broadcast as this rank sees it, after a barrier that starts all ranks together."""
    group.barrier().wait()
    started = time.perf_counter()
    options = dist.BroadcastOptions()
    group.broadcast([flat], options).wait()
    return time.perf_counter() - started


class Peer:
    """The Ray actor in place of a replica: a receiver of each transport, and a rank of the raw group."""

    def __init__(self, rank: int, world_size: int) -> None:
        torch.set_num_threads(1)
        self._rank, self._world_size = rank, world_size
        self._receivers: dict[str, WeightReceiver] = {}
        self._group: Any = None
        self._flat = torch.zeros(0, dtype=torch.uint8)

    def join(self, transport: str, config: WeightsConfig, endpoint: str) -> None:
        self._receivers[transport] = receiver = build_receiver(config, "ray")
        receiver.connect(endpoint, self._rank, self._world_size, 0, f"g{self._rank}")

    def join_raw(self, host: str, port: int, size: int) -> None:
        store = dist.TCPStore(host, port, None, False, timedelta(seconds=TIMEOUT_SECONDS))
        self._group = raw_group(store, self._rank, self._world_size, host)
        self._flat = torch.zeros(size, dtype=torch.uint8)

    def raw(self) -> None:
        raw_broadcast(self._group, self._flat)

    def take(self, transport: str, ticket: Any) -> float:
        """Receive a version; returns the sum of its final norm."""
        return float(self._receivers[transport].receive(ticket)[NORM].sum())

    def close(self) -> None:
        for receiver in self._receivers.values():
            receiver.close()


class Bench:
    """One parameter set and everything that is connected for it."""

    def __init__(self, shape: Shape, chosen: Sequence[Variant], receivers: int, bucket_mb: float, folder: Path) -> None:
        self.shape, self.params, self.variants = shape, shape.tensors(), list(chosen)
        self.total = sum(tensor.nbytes for tensor in self.params.values())
        remote = ray.remote(Peer).options(num_cpus=0)
        self._peers: list[Any] = [remote.remote(rank, receivers + 1) for rank in range(1, receivers + 1)]
        names = [f"g{rank}" for rank in range(1, receivers + 1)]
        self._senders: dict[str, WeightSender] = {}
        for transport in dict.fromkeys(variant.transport for variant in chosen):
            config = WeightsConfig(
                transport=transport, bucket_mb=bucket_mb, timeout_seconds=TIMEOUT_SECONDS,
                disk_path=str(folder / "weights") if transport == "disk" else "",
            )  # fmt: skip
            sender = self._senders[transport] = build_sender(config, "ray", self.params)
            endpoint = sender.listen("127.0.0.1")
            joining = self._tell("join", transport, config, endpoint)
            sender.connect(endpoint, names, 0)
            ray.get(joining)
        store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=TIMEOUT_SECONDS), wait_for_workers=False)
        joining = self._tell("join_raw", "127.0.0.1", store.port, self.total)
        self._group = raw_group(store, 0, receivers + 1, "127.0.0.1")
        self._flat = torch.zeros(self.total, dtype=torch.uint8)
        ray.get(joining)

    def _tell(self, method: str, *arguments: Any) -> list[Any]:
        return [getattr(peer, method).remote(*arguments) for peer in self._peers]

    def round(self, number: int) -> dict[str, dict[str, float]]:
        """Seconds of the raw broadcast and of each way to publish, one after another, with a different one first each
        time."""
        self._tell("raw")
        rows = {"raw": {"publish": raw_broadcast(self._group, self._flat)}}
        first = number % len(self.variants)
        for place, variant in enumerate(self.variants[first:] + self.variants[:first]):
            rows[variant.label] = self._publish(variant, version=1 + number * len(self.variants) + place)
        return rows

    def _publish(self, variant: Variant, version: int) -> dict[str, float]:
        """``publish``: from the request to the last replica's answer. ``stall``: the part of it during which a learner
        without other work waits. ``fenced``: the wait if the copy runs during a forward pass."""
        sender: Any = self._senders[variant.transport]
        sender.wire = replace(sender.wire, checksum=variant.checksum)
        self.params[NORM].fill_(version)
        started = time.perf_counter()
        sender.begin_snapshot(version, self.params)
        sender.fence()
        stall = time.perf_counter() - started
        ticket = sender.ticket()
        taking = self._tell("take", variant.transport, ticket)
        sender.transfer(ticket)
        sums = ray.get(taking, timeout=TIMEOUT_SECONDS)
        publish = time.perf_counter() - started
        if sums != [float(version * self.shape.hidden)] * len(taking):
            raise AssertionError(f"version {version} arrived wrong by {variant.label}: {sums}")
        fenced = self._fenced_stall(sender, version)
        return {"publish": publish, "stall": stall, "transfer": publish - stall, "fenced": fenced}

    def _fenced_stall(self, sender: WeightSender, version: int) -> float:
        tokens = torch.randn(COMPUTE_TOKENS, self.shape.hidden)
        started = time.perf_counter()
        sender.begin_snapshot(version, self.params)
        begun = time.perf_counter() - started
        for i in range(self.shape.layers):
            for part in ("gate_proj", "up_proj"):
                tokens @ self.params[f"model.layers.{i}.mlp.{part}.weight"].T
        return begun + sender.fence()

    def close(self) -> None:
        ray.get(self._tell("close"), timeout=TIMEOUT_SECONDS)
        for sender in self._senders.values():
            sender.close()
        for peer in self._peers:
            ray.kill(peer)


def measure(
    shape: Shape, chosen: Sequence[Variant], *, receivers: int, repeats: int, bucket_mb: float = 32.0,
    disk_path: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Publish a model of ``shape`` in every way ``chosen`` to ``receivers`` processes of this machine: ``repeats``
    rounds after one that warms up. Needs a running Ray. Returns bytes, seconds and ratios as :func:`summarize` does;
    ``disk_path``: the folder under which ``transport=disk`` writes (default: the system's temporary folder)."""
    with tempfile.TemporaryDirectory(prefix="weights-", dir=disk_path) as folder:
        bench = Bench(shape, chosen, receivers, bucket_mb, Path(folder))
        try:
            rounds = [bench.round(number) for number in told(repeats)][1:]
        finally:
            bench.close()
    return summarize(rounds, bench.total, receivers)


def told(repeats: int) -> Iterator[int]:
    """0, the warm-up, to ``repeats``, each with a line on the terminal."""
    for number in range(repeats + 1):
        tell(number, repeats)
        yield number


def summarize(rounds: Sequence[Round], total: int, receivers: int) -> dict[str, Any]:
    """Ratios of each round, because rounds on a busy machine differ more than the sides of one round. ``total``: bytes
    of one version."""
    raw = statistics.median(row["raw"]["publish"] for row in rounds)
    ways = {label: _way(rounds, label, total) for label in sorted(rounds[0]) if label != "raw"}
    return {
        "bytes": total,
        "receivers": receivers,
        "repeats": len(rounds),
        "raw_gb_per_second": total / raw / 1e9,
        "ways": ways,
        "rounds": [{label: dict(seconds) for label, seconds in row.items()} for row in rounds],
    }


def _way(rounds: Sequence[Round], label: str, total: int) -> dict[str, float]:
    ratios = sorted(row["raw"]["publish"] / row[label]["publish"] for row in rounds)
    seconds = {key: statistics.median(row[label][key] for row in rounds) for key in ("publish", "stall", "fenced")}
    return {
        "ratio_median": statistics.median(ratios),
        "ratio_min": ratios[0],
        "ratio_max": ratios[-1],
        "gb_per_second": total / seconds["publish"] / 1e9,
        "publish_seconds": seconds["publish"],
        "stall_seconds": seconds["stall"],
        "fenced_stall_seconds": seconds["fenced"],
        "fenced_stall_share": statistics.median(row[label]["fenced"] / row[label]["publish"] for row in rounds),
    }


SHAPES = {
    "0.7M": Shape(layers=4, hidden=128, intermediate=320, key_value=64, vocabulary=64),
    "10M": Shape(layers=8, hidden=320, intermediate=864, key_value=160, vocabulary=4096),
    "135M": Shape(layers=30, hidden=576, intermediate=1536, key_value=192, vocabulary=49152),  # SmolLM2-135M
}


def variants(transports: Sequence[str]) -> list[Variant]:
    """Each transport with and without checksums."""
    return [Variant(transport, checksum=on) for transport in transports for on in (True, False)]


def _options(args: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench weights", description=__doc__)
    parser.add_argument("--sizes", default=",".join(SHAPES), help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--transports", default="collective,object_store,disk")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--receivers", type=int, default=2)
    parser.add_argument("--bucket-mb", type=float, default=32.0)
    parser.add_argument("--learner-threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--disk-path", type=Path, default=None, help="where the disk's versions go; default: a temporary folder"
    )
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(list(args))
    options.sizes, options.transports = options.sizes.split(","), options.transports.split(",")
    for size in options.sizes:
        check_choice("--sizes", size, tuple(SHAPES))
    for transport in options.transports:
        check_choice("--transports", transport, ("collective", "object_store", "disk"))
    check_range("--repeats", options.repeats, low=1)
    check_range("--receivers", options.receivers, low=1)
    check_range("--bucket-mb", options.bucket_mb, low=0, exclusive_low=True)
    check_range("--learner-threads", options.learner_threads, low=1)
    check(options.disk_path is None or options.disk_path.is_dir(), f"--disk-path={options.disk_path} is not a folder.")
    return options


def run(args: Sequence[str] = ()) -> dict[str, Any]:
    """Run the benchmark with command-line ``args``; prints the ratios and returns what it writes to ``--out``."""
    options = _options(args)
    torch.set_num_threads(options.learner_threads)
    started_here = not ray.is_initialized()
    if started_here:
        ray.init(
            include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, object_store_memory=4 * 2**30
        )
    try:
        ways = variants(options.transports)
        sizes = [
            {
                "size": name,
                **measure(
                    SHAPES[name], ways, receivers=options.receivers, repeats=options.repeats,
                    bucket_mb=options.bucket_mb, disk_path=options.disk_path,
                ),
            }
            for name in options.sizes
        ]  # fmt: skip
    finally:
        if started_here:
            ray.shutdown()
    result = {"learner_threads": options.learner_threads, "bucket_mb": options.bucket_mb, "sizes": sizes}
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    report(result)
    return result


def report(result: Mapping[str, Any]) -> None:
    """Print a table for each size."""
    print(
        "ratio: seconds of a raw gloo broadcast over seconds of a publish, snapshot to last answer; stall: the learner "
        f"stands still; fenced: the same beside a forward pass; {result['learner_threads']} learner thread(s)"
    )
    for size in result["sizes"]:
        print(
            f"\n{size['size']} parameters, {size['bytes'] / 1e6:.1f} MB to {size['receivers']} receivers, "
            f"{size['repeats']} rounds; raw broadcast {size['raw_gb_per_second']:.2f} GB/s"
        )
        print(f"{'':32}{'ratio (least, most)':>24}{'GB/s':>8}{'publish s':>11}{'stall s':>10}{'fenced s':>10}")
        for label, way in size["ways"].items():
            ratio = f"{way['ratio_median']:.2f} ({way['ratio_min']:.2f}, {way['ratio_max']:.2f})"
            print(
                f"{label:32}{ratio:>24}{way['gb_per_second']:8.2f}{way['publish_seconds']:11.4f}"
                f"{way['stall_seconds']:10.4f}{way['fenced_stall_seconds']:10.4f}"
            )
