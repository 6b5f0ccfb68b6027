"""Weight publish of a 135M-parameter model over gloo, beside one raw gloo broadcast of the same bytes."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from asyncrlhf.transport.collective import CollectiveReceiver, CollectiveSender
from asyncrlhf.transport.manifest import build_manifest

LAYERS, HIDDEN, INTERMEDIATE, KEY_VALUE, VOCABULARY = 30, 576, 1536, 192, 49152  # SmolLM2-135M, tied embeddings
TIMEOUT_SECONDS = 60.0
COMPUTE_TOKENS = 512  # of the compute beside a copy: far less than a real microbatch, which also runs backward


def smollm2_tensors() -> dict[str, torch.Tensor]:
    """Random float32 tensors with the names and shapes of SmolLM2-135M: 134.5 M elements, 538 MB."""
    block = {
        "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (KEY_VALUE, HIDDEN),
        "self_attn.v_proj": (KEY_VALUE, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN), "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE), "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    shapes |= {f"model.layers.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in block.items()}
    shapes["model.norm.weight"] = (HIDDEN,)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def raw_group(store: dist.Store, rank: int, size: int, host: str) -> Any:
    """torch's own gloo group with its defaults, but for the network address."""
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


def receiver_main(rank: int, world_size: int, endpoint: str, store_port: int, total: int, pipe: Connection) -> None:
    """Does what the sender's process says: ``raw``, or a ticket to receive; ends at None."""
    torch.set_num_threads(1)
    host = endpoint.rpartition(":")[0]
    receiver = CollectiveReceiver(timeout_seconds=TIMEOUT_SECONDS)
    receiver.connect(endpoint, rank, world_size, 0, f"g{rank}")
    store = dist.TCPStore(host, store_port, None, False, timedelta(seconds=TIMEOUT_SECONDS))
    group = raw_group(store, rank, world_size, host)
    flat = torch.zeros(total, dtype=torch.uint8)
    while (order := pipe.recv()) is not None:
        if order == "raw":
            raw_broadcast(group, flat)
            pipe.send("done")
        else:
            started = time.perf_counter()
            weights = receiver.receive(order)
            pipe.send((time.perf_counter() - started, float(weights["model.norm.weight"].sum())))
    receiver.close()


def measure(
    sender: CollectiveSender, group: Any, flat: torch.Tensor, params: Mapping[str, torch.Tensor],
    pipes: Sequence[Connection], repeats: int,
) -> list[dict[str, float]]:  # fmt: skip
    """Alternate a raw broadcast and a publish; one row of seconds each. The first round warms up and is left out."""
    rows = []
    for version in range(repeats + 1):
        for pipe in pipes:
            pipe.send("raw")
        raw = raw_broadcast(group, flat)
        for pipe in pipes:
            pipe.recv()
        params["model.norm.weight"].fill_(version)
        stall = sender.snapshot(version, params)
        ticket = sender.ticket()
        for pipe in pipes:
            pipe.send(ticket)
        transfer = sender.transfer(ticket).seconds
        sums = [pipe.recv()[1] for pipe in pipes]
        if sums != [float(version * HIDDEN)] * len(pipes):
            raise AssertionError(f"version {version} arrived wrong: {sums}")
        rows.append({"raw": raw, "stall": stall, "transfer": transfer, "publish": stall + transfer})
        rows[-1]["fenced_stall"] = fenced_stall(sender, version, params)
    return rows[1:]


def fenced_stall(sender: CollectiveSender, version: int, params: Mapping[str, torch.Tensor]) -> float:
    """Seconds that a learner stands still when the copy runs beside the forward pass of its next microbatch."""
    tokens = torch.randn(COMPUTE_TOKENS, HIDDEN)
    started = time.perf_counter()
    sender.begin_snapshot(version, params)
    begun = time.perf_counter() - started
    for i in range(LAYERS):
        for part in ("gate_proj", "up_proj"):
            tokens @ params[f"model.layers.{i}.mlp.{part}.weight"].T
    return begun + sender.fence()


def summarize(rows: Sequence[Mapping[str, float]], total: int, receivers: int) -> dict[str, Any]:
    """Ratios of each round, because rounds on a busy machine differ more than the two sides of one round."""
    ratios = sorted(row["raw"] / row["publish"] for row in rows)
    shares = sorted(row["stall"] / row["transfer"] for row in rows)
    fenced = sorted(row["fenced_stall"] / row["transfer"] for row in rows)
    return {
        "bytes": total,
        "receivers": receivers,
        "repeats": len(rows),
        "bandwidth_ratio_median": statistics.median(ratios),
        "bandwidth_ratio_min": ratios[0],
        "bandwidth_ratio_max": ratios[-1],
        "stall_share_median": statistics.median(shares),
        "stall_share_max": shares[-1],
        "fenced_stall_share_median": statistics.median(fenced),
        "fenced_stall_share_max": fenced[-1],
        "raw_gb_per_second": total / statistics.median(row["raw"] for row in rows) / 1e9,
        "publish_gb_per_second": total / statistics.median(row["publish"] for row in rows) / 1e9,
        "rounds": [dict(row) for row in rows],
    }


def run(args: Sequence[str] = ()) -> dict[str, Any]:
    """Run the benchmark with command-line ``args``; prints the ratios and returns what it writes to ``--out``."""
    parser = argparse.ArgumentParser(prog="bench weights", description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--receivers", type=int, default=2)
    parser.add_argument("--bucket-mb", type=float, default=32.0)
    parser.add_argument("--learner-threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(list(args))
    torch.set_num_threads(options.learner_threads)
    params = smollm2_tensors()
    manifest = build_manifest(params, int(options.bucket_mb * 2**20))
    world_size = options.receivers + 1
    sender = CollectiveSender(manifest, timeout_seconds=TIMEOUT_SECONDS)
    endpoint = sender.listen()
    host = endpoint.rpartition(":")[0]
    store = dist.TCPStore(host, 0, None, True, timedelta(seconds=TIMEOUT_SECONDS), wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    pairs = [context.Pipe() for _ in range(options.receivers)]
    processes = [
        context.Process(
            target=receiver_main,
            args=(rank, world_size, endpoint, store.port, manifest.total_bytes, pair[1]),
            daemon=True,
        )
        for rank, pair in enumerate(pairs, start=1)
    ]
    for process in processes:
        process.start()
    pipes = [pair[0] for pair in pairs]
    sender.connect(endpoint, [f"g{rank}" for rank in range(1, world_size)], 0)
    group = raw_group(store, 0, world_size, host)
    flat = torch.zeros(manifest.total_bytes, dtype=torch.uint8)
    rows = measure(sender, group, flat, params, pipes, options.repeats)
    for pipe in pipes:
        pipe.send(None)
    for process in processes:
        process.join(timeout=30)
    sender.close()
    result = {**summarize(rows, manifest.total_bytes, options.receivers), "learner_threads": options.learner_threads}
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    report(result)
    return result


def report(result: Mapping[str, Any]) -> None:
    print(
        f"publish of {result['bytes'] / 1e6:.0f} MB to {result['receivers']} receivers, {result['repeats']} rounds, "
        f"{result['learner_threads']} learner thread(s)\n"
        f"bandwidth, publish over raw gloo broadcast: {result['bandwidth_ratio_median']:.2f} "
        f"({result['bandwidth_ratio_min']:.2f} to {result['bandwidth_ratio_max']:.2f}); "
        f"{result['publish_gb_per_second']:.2f} and {result['raw_gb_per_second']:.2f} GB/s\n"
        f"learner stall over transfer: {result['stall_share_median']:.3f} (largest {result['stall_share_max']:.3f}) "
        f"with snapshot, {result['fenced_stall_share_median']:.3f} (largest {result['fenced_stall_share_max']:.3f}) "
        f"with begin_snapshot and fence"
    )


if __name__ == "__main__":
    import sys

    run(sys.argv[1:])
