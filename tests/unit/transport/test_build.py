"""Settings to transports: what ``auto`` means, what is refused, and errors that survive a process border."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from asyncrlhf.cluster.parts import wire_settings
from asyncrlhf.config.compose import load_config
from asyncrlhf.errors import ConfigError
from asyncrlhf.transport.build_transport import build_sender, resolve_transport
from asyncrlhf.transport.collective.group import choose_backend
from asyncrlhf.transport.collective.sender import CollectiveSender
from asyncrlhf.transport.local import LocalSender
from asyncrlhf.transport.protocol import LostReceiversError
from asyncrlhf.transport.weights_config import WeightsConfig


def test_auto_follows_the_runtime() -> None:
    assert resolve_transport(WeightsConfig(), "local") == "local"
    assert resolve_transport(WeightsConfig(), "ray") == "collective"
    assert resolve_transport(WeightsConfig(transport="object_store"), "ray") == "object_store"


@pytest.mark.parametrize(
    ("transport", "runtime"), [("local", "ray"), ("collective", "local"), ("object_store", "local")]
)
def test_impossible_pairs_are_refused_in_one_sentence(transport: str, runtime: str) -> None:
    with pytest.raises(ConfigError, match=f"weights.transport={transport} does not work with runtime={runtime}"):
        resolve_transport(WeightsConfig(transport=transport), runtime)


def test_bucket_size_is_in_mebibytes() -> None:
    params = {f"p{i}": torch.zeros(2**18) for i in range(4)}  # 1 MiB each
    sender = build_sender(WeightsConfig(bucket_mb=2), "local", params)
    assert isinstance(sender, LocalSender)
    assert sender.manifest.bucket_bytes == (2 * 2**20, 2 * 2**20)
    assert isinstance(build_sender(WeightsConfig(), "ray", params), CollectiveSender)


@pytest.mark.parametrize(
    ("overrides", "verified"),
    [
        ((), False),
        (("weights.checksum=true",), True),
        (("weights.delta=sparse",), True),
        (("weights.transport=disk",), True),
        (("weights.transport=disk", "weights.checksum=false"), False),
        (("ray.address=10.0.0.1:6379",), True),
        (("ray.address=10.0.0.1:6379", "weights.checksum=false"), False),
    ],
)
def test_checksums_are_taken_where_weights_leave_the_machine(
    overrides: tuple[str, ...], verified: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    weights = wire_settings(load_config(list(overrides)), tmp_path)
    assert weights.verifies == verified
    sender = build_sender(weights, "ray", {"p": torch.zeros(4)})
    sender.listen()
    sender.snapshot(1, {"p": torch.ones(4)})
    assert bool(sender.ticket().checksums) == verified
    sender.close()


def test_nccl_only_where_every_rank_has_a_device_of_its_own() -> None:
    have_nccl = torch.distributed.is_nccl_available()
    assert choose_backend(["cuda:a", "cuda:b"]) == ("nccl" if have_nccl else "gloo")
    assert choose_backend(["cuda:a", "cuda:a"]) == "gloo"
    assert choose_backend(["cuda:a", "cpu"]) == "gloo"
    assert choose_backend(["cpu", "cpu"]) == "gloo"


def test_lost_receivers_survive_pickling() -> None:
    error = pickle.loads(pickle.dumps(LostReceiversError("Version 3 is lost", {"g1": "died", "g2": "is silent"})))
    assert isinstance(error, LostReceiversError)
    assert str(error) == "Version 3 is lost: g1 died; g2 is silent."
    assert error.receivers == {"g1": "died", "g2": "is silent"}
