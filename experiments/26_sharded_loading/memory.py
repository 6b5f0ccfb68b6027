"""Peak private memory of each rank while a model is loaded in shards, against what its shard needs.

``python experiments/26_sharded_loading/memory.py --ranks 8`` writes a random model as safetensors, starts gloo ranks
and prints one line: of each rank the growth of ``RssAnon`` from after its imports to its highest while models and
backend are built, over the bytes of its shard and of the largest layer or embedding.
``--whole`` loads as other layouts do.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import socket
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


def private() -> int:
    """Bytes of anonymous memory of this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


class Peak:
    """The highest ``private`` while it lasts, looked at every 2 ms."""

    def __enter__(self) -> Peak:
        self.bytes, self._over = private(), threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(0.002):
            self.bytes = max(self.bytes, private())

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def shape(options: argparse.Namespace) -> Any:
    import transformers

    return transformers.LlamaConfig(
        vocab_size=options.vocabulary, hidden_size=options.hidden, intermediate_size=options.hidden * 11 // 4,
        num_hidden_layers=options.layers, num_attention_heads=options.hidden // 64, tie_word_embeddings=True,
    )  # fmt: skip


def write(options: argparse.Namespace, folder: Path) -> tuple[int, int]:
    """A checkpoint of random bfloat16 tensors; (bytes in float32, those of the largest layer or embedding)."""
    import accelerate
    import torch
    import transformers
    from safetensors.torch import save_file

    config = shape(options)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    with accelerate.init_empty_weights():
        model = transformers.LlamaForCausalLM(config)
    units: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        unit = name.split(".")[2] if ".layers." in name else name
        units[unit] = units.get(unit, 0) + 4 * parameter.numel()
    noise = torch.randn(2**20).mul_(0.02).bfloat16()
    names = dict(model.named_parameters())
    files = {name: f"model-{index:05}-of-{len(names):05}.safetensors" for index, name in enumerate(names)}
    index = {"metadata": {"total_size": sum(2 * p.numel() for p in names.values())}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, parameter in names.items():
        repeats = -(-parameter.numel() // len(noise))
        tensor = noise.repeat(repeats)[: parameter.numel()].view(parameter.shape)
        save_file({name: tensor.contiguous()}, folder / files[name], {"format": "pt"})
    return sum(units.values()), max(units.values())


def rank_job(pipe: Connection, rank: int, options: argparse.Namespace, port: int, folder: str) -> None:
    import torch
    import transformers

    from asyncrlhf.actors.learner import LearnerSpec, load_models
    from asyncrlhf.data.data_config import ModelConfig
    from asyncrlhf.learner.ranks import init_process_group
    from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
    from asyncrlhf.learner.settings.learner_config import LearnerConfig
    from asyncrlhf.learner.torch_backend import TorchBackend
    from asyncrlhf.transport.weights_config import WeightsConfig

    transformers.LlamaForCausalLM(transformers.LlamaConfig(  # what transformers imports when it is first used
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
    ))  # fmt: skip
    torch.set_num_threads(1)
    init_process_group(rank, options.ranks, f"127.0.0.1:{port}", timeout_seconds=1800)
    zero3: dict[str, Any] = {"backend": "deepspeed", "zero_stage": 3}
    if options.zero3:
        importlib.import_module("deepspeed.runtime.zero.stage3")  # whose memory is not that of weights
    learner = LearnerConfig(ranks=options.ranks, **(zero3 if options.zero3 else {"sharding": "fsdp2"}))
    spec = LearnerSpec(
        learner=learner, algorithm=AlgorithmConfig(), steps=1, model=ModelConfig(path=folder), runtime="ray",
        weights=WeightsConfig(), seed=0,
    )  # fmt: skip
    torch.distributed.barrier()
    before, started = private(), time.monotonic()
    with Peak() as peak:
        if options.whole:
            from asyncrlhf.models.pretrained import load_policy

            models: dict[str, Any] = {"model": load_policy(spec.model, "cpu", torch.float32)}
        else:
            models = load_models(spec, "cpu")
        backend = TorchBackend(spec=spec, **models, rank=rank, ranks=options.ranks)
        del models
    pipe.send((before, peak.bytes, private(), time.monotonic() - started))
    torch.distributed.barrier()
    del backend


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--whole", action="store_true", help="each rank loads the whole model first")
    parser.add_argument("--zero3", action="store_true", help="DeepSpeed's ZeRO stage 3 in the place of FSDP2")
    parser.add_argument("--out", type=Path, help="a file to which the line is appended")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        total, largest = write(options, Path(folder))
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe(duplex=False) for _ in range(options.ranks)]
        processes = [
            context.Process(target=rank_job, args=(send, rank, options, port, folder), daemon=True)
            for rank, (_, send) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        for _, send in pipes:
            send.close()  # so that a rank that dies ends the wait for it
        found = [receive.recv() for receive, _ in pipes]
        for process in processes:
            process.join()
    needed = total / options.ranks + largest
    row = {
        "ranks": options.ranks, "layers": options.layers, "hidden": options.hidden, "whole": options.whole,
        "zero3": options.zero3,
        "model_mib": total / 2**20, "largest_mib": largest / 2**20, "needed_mib": needed / 2**20,
        "growth_mib": [(peak - before) / 2**20 for before, peak, _, _ in found],
        "after_mib": [(after - before) / 2**20 for before, _, after, _ in found],
        "seconds": [seconds for *_, seconds in found],
        "worst_over_needed": max(peak - before for before, peak, _, _ in found) / needed,
    }  # fmt: skip
    print(json.dumps(row))
    if options.out:
        with options.out.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
