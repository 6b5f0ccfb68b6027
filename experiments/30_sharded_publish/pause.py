"""The learner's pause for a publish of sharded weights: a copy of each rank's own parts, against gathering all first.

``python experiments/30_sharded_publish/pause.py`` prints one line for each round, in which two FSDP2 ranks make both.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import statistics
import time
from typing import Any

SECONDS = 120.0


def bucket_names(manifest: Any) -> list[tuple[str, ...]]:
    from asyncrlhf.transport.manifest import entries_by_bucket

    return [tuple(entry.name for entry in entries) for entries in entries_by_bucket(manifest)]


def rank_of(rank: int, ranks: int, port: int, options: argparse.Namespace, pipe: Any) -> None:
    import torch
    import torch.distributed as dist
    import transformers

    from asyncrlhf.learner.ranks import init_process_group
    from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
    from asyncrlhf.learner.settings.learner_config import BackendSpec, LearnerConfig
    from asyncrlhf.learner.torch_backend import TorchBackend
    from asyncrlhf.transport.build_transport import lay_out
    from asyncrlhf.transport.manifest import FlatBuckets, copy_tensors
    from asyncrlhf.transport.shard_snapshot import ShardSnapshot
    from asyncrlhf.transport.weights_config import WeightsConfig

    torch.set_num_threads(1)
    init_process_group(rank, ranks, f"127.0.0.1:{port}")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=16000, hidden_size=options.hidden, intermediate_size=options.hidden * 11 // 4,
        num_hidden_layers=options.layers, num_attention_heads=8, tie_word_embeddings=True,
    )  # fmt: skip
    spec = BackendSpec(learner=LearnerConfig(ranks=ranks, sharding="fsdp2"), algorithm=AlgorithmConfig(), steps=1)
    backend = TorchBackend(transformers.LlamaForCausalLM(config), spec, rank=rank, ranks=ranks)
    shards = backend.shards
    assert shards is not None
    weights = WeightsConfig(transport="collective", dtype=options.dtype)
    manifest = lay_out(weights, shards.layout())
    snapshot = ShardSnapshot(shards, manifest, rank=rank, ranks=ranks, seconds=SECONDS)
    whole = FlatBuckets(manifest) if rank == 0 else None

    def gather_first() -> None:
        """What a snapshot was before: all ranks gather bucket after bucket, and rank 0 keeps each."""
        for names in bucket_names(manifest):
            with shards.gather(names) as tensors:
                if whole is not None:
                    copy_tensors({name: whole.views()[name] for name in names}, tensors)

    def timed(action: Any) -> float:
        dist.barrier()
        started = time.perf_counter()
        action()
        seconds = torch.tensor(time.perf_counter() - started)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return float(seconds)

    def fetch_all() -> None:
        for bucket, size in enumerate(manifest.bucket_bytes if rank == 0 else ()):
            snapshot.fetch(bucket, torch.empty(size, dtype=torch.uint8))

    for number in range(-1, options.rounds):  # the first warms up
        ways = [("gather_first", gather_first), ("own_parts", snapshot.take)]
        row = {name: timed(way) for name, way in (ways if number % 2 else reversed(ways))}
        row["fetched_later"] = timed(fetch_all)
        if rank == 0 and number >= 0:
            pipe.send({"round": number, "bytes": sum(manifest.bucket_bytes), "dtype": options.dtype} | row)
    snapshot.close()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    ranks = [context.Process(target=rank_of, args=(r, 2, port, options, send), daemon=True) for r in range(2)]
    for process in ranks:
        process.start()
    send.close()
    ratios = []
    for _ in range(options.rounds):
        row = receive.recv()
        ratios.append(row["own_parts"] / row["gather_first"])
        print(json.dumps(row), flush=True)
    for process in ranks:
        process.join(timeout=30)
    print(f"ratio: median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    main()
