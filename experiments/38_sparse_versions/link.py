"""A publish over links of 1 Gbit/s: network namespaces for the learner and four machines, joined by a bridge, each link
limited in both directions by ``tc``. Needs root.

python -m experiments.38_sparse_versions.link --out link.json
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pickle
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from asyncrlhf.bench.checkpoint import build
from asyncrlhf.learner.settings.algorithm import AlgorithmConfig
from asyncrlhf.learner.settings.learner_config import BackendSpec, LearnerConfig
from asyncrlhf.learner.torch_backend import TorchBackend
from asyncrlhf.transport.build_transport import build_receiver, build_sender
from asyncrlhf.transport.protocol import Ticket
from asyncrlhf.transport.relay import RelayReceiver
from asyncrlhf.transport.weights_config import WeightsConfig

sparsity = importlib.import_module("experiments.38_sparse_versions.sparsity")
TOKENS, other_texts = sparsity.TOKENS, sparsity.other_texts

HOSTS, RATE = 4, "1gbit"
WORKERS = "one group for each receiver"  # as those of vLLM's workers without a relay
Params = Mapping[str, torch.Tensor]


@contextmanager
def network() -> Iterator[None]:
    """Namespaces ``learner`` and ``h1`` to ``h4``, with addresses 10.9.0.1 to 10.9.0.5."""

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    spaces = ["learner", *(f"h{i}" for i in range(1, HOSTS + 1))]
    for name in ("switch", *spaces):
        ip("netns", "add", name)
    try:
        ip("-n", "switch", "link", "add", "bridge", "type", "bridge")
        ip("-n", "switch", "link", "set", "bridge", "up")
        for number, name in enumerate(spaces, start=1):
            ip("-n", "switch", "link", "add", name, "type", "veth", "peer", "name", "eth", "netns", name)
            ip("-n", "switch", "link", "set", name, "master", "bridge", "up")
            ip("-n", name, "addr", "add", f"10.9.0.{number}/24", "dev", "eth")
            ip("-n", name, "link", "set", "eth", "up")
            ip("-n", name, "link", "set", "lo", "up")
            for space, device in ((name, "eth"), ("switch", name)):
                tc = ["tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", RATE, "burst", "256kb"]
                ip("netns", "exec", space, *tc, "latency", "50ms")
        yield
    finally:
        for name in ("switch", *spaces):
            ip("netns", "del", name)


class Remote:
    """A receiver in a process of its own, in a namespace."""

    def __init__(self, name: str, host: int, config: WeightsConfig) -> None:
        self.name, self.host = name, host
        self._line, theirs = socket.socketpair()
        command = [
            "ip",
            "netns",
            "exec",
            f"h{host}",
            sys.executable,
            "-m",
            __spec__.name,
            "serve",
            f"{theirs.fileno()}",
        ]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self._file = self._line.makefile("rwb")
        self.say("build", config)
        self.hear()

    def say(self, *order: Any) -> None:
        pickle.dump(order, self._file)
        self._file.flush()

    def hear(self) -> Any:
        found = pickle.load(self._file)
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._file.close()
        self._line.close()


def serve(number: int) -> None:
    torch.set_num_threads(1)
    file = socket.socket(fileno=number).makefile("rwb")
    receiver: Any = None
    own: dict[str, torch.Tensor] = {}

    def load(weights: Params) -> float:
        """As an engine does: into its own tensors."""
        started = time.perf_counter()
        for name, tensor in weights.items():
            own[name] = own[name].copy_(tensor) if name in own else tensor.clone()
        return time.perf_counter() - started

    while True:
        try:
            kind, *rest = pickle.load(file)
        except EOFError:
            return
        answer: Any = None
        try:
            if kind == "build":
                receiver = build_receiver(rest[0], "ray")
            elif kind == "connect":
                receiver.connect(*rest)
            elif kind == "receive":
                weights = receiver.receive(rest[0])
                answer = (load(weights), receiver.offer() if isinstance(receiver, RelayReceiver) else None)
            elif kind == "map":
                answer = (sum(load(views) for views in receiver.stream(rest[0])), None)
            elif kind == "sum":
                answer = {name: tensor.view(torch.int16).sum().item() for name, tensor in own.items()}
        except Exception as error:
            answer = error
        pickle.dump(answer, file)
        file.flush()


def measure(receivers: int, way: str, learner: TorchBackend, repeats: int) -> dict[str, Any]:
    """Seconds of publishes to ``receivers``, four to a machine, from the ticket until all have loaded; between two of
    them the learner makes a step."""
    params = {name: tensor.detach() for name, tensor in learner.parameters().items()}
    relay, delta = "relay" in way, "sparse" if "sparse" in way else "none"
    kind = "relay" if relay else "collective"
    config = WeightsConfig(transport=kind, dtype="bfloat16", delta=delta, timeout_seconds=300)
    sender = build_sender(config, "ray", params)
    per_host = -(-receivers // HOSTS)
    remotes = [Remote(f"g{i}", 1 + i // per_host, config) for i in range(receivers)]
    gates = [r for i, r in enumerate(remotes) if not relay or i % per_host == 0]
    endpoint = sender.listen("10.9.0.1")
    groups = [[r] for r in gates] if way == WORKERS else [gates]
    for epoch, group in enumerate(groups, start=1):
        for rank, remote in enumerate(group, start=1):
            remote.say("connect", endpoint, rank, len(group) + 1, epoch, remote.name)
        sender.connect(endpoint, [remote.name for remote in group], epoch)
        for remote in group:
            remote.hear()
    seconds, sent, pauses = [], 0, []
    for version in range(repeats + 1):
        learner.train_step(other_texts(learner.policy_version))
        sender.snapshot(version, params)
        started = time.perf_counter()
        ticket = sender.ticket()  # waits for checksums and comparison
        offers: dict[int, Ticket] = {}
        for epoch, group in enumerate(groups, start=1):
            own = Ticket(ticket.version, epoch, ticket.manifest, ticket.refs, ticket.checksums, ticket.sparse)
            for remote in group:
                remote.say("receive", own)
            sent = sender.transfer(own).bytes
            for remote in group:
                pause, offers[remote.host] = remote.hear()
                pauses.append(pause)
        others = [remote for remote in remotes if remote not in gates]
        for remote in others:
            remote.say("map", offers[remote.host])
        for remote in others:
            remote.hear()
        seconds.append(time.perf_counter() - started)
    expected = {name: tensor.bfloat16().view(torch.int16).sum().item() for name, tensor in params.items()}
    for remote in remotes:
        remote.say("sum")
        assert remote.hear() == expected, remote.name
        remote.close()
    sender.close()
    found = {"way": way, "receivers": receivers, "bytes": sent, "first": seconds[0], "seconds": seconds[1:]}
    found |= {"median": statistics.median(seconds[1:]), "load_median": statistics.median(pauses)}
    print({k: v if not isinstance(v, float) else round(v, 3) for k, v in found.items()}, flush=True)
    return found


CASES = (
    (1, "whole"), (1, "sparse"), (4, "whole"), (4, "sparse"), (4, "whole relay"), (4, "sparse relay"), (16, "whole"),
    (16, WORKERS), (16, "sparse"), (16, "whole relay"), (16, "sparse relay"), (1, "whole"),
)  # fmt: skip


def main(words: Sequence[str]) -> None:
    if words[:1] == ["serve"]:
        return serve(int(words[1]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--only", nargs="+", help="only these ways")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "link.json")
    options = parser.parse_args(words)
    if os.environ.get("IN_NAMESPACE") != "learner":
        with network():
            inside = {**os.environ, "IN_NAMESPACE": "learner"}
            command = ["ip", "netns", "exec", "learner", sys.executable, "-m", __spec__.name, *words]
            subprocess.run(command, check=True, env=inside)
        return
    torch.set_num_threads(2)
    config = LearnerConfig(learning_rate=options.learning_rate, token_budget=TOKENS)
    spec = BackendSpec(learner=config, algorithm=AlgorithmConfig(), steps=10**6)
    learner = TorchBackend(build("135m"), spec)
    cases = [case for case in CASES if not options.only or case[1] in options.only]
    rows = [measure(receivers, way, learner, options.repeats) for receivers, way in cases]
    facts = {"rate": RATE, "learning_rate": options.learning_rate, "rows": rows}
    options.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
