"""What a start on a cluster looks at besides devices: network cards, the run directory, Ray's own address variable."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from asyncrlhf.actors import where
from asyncrlhf.cluster import own_ray
from asyncrlhf.cluster.parts import build_runtime
from asyncrlhf.cluster.placement import make_plan
from asyncrlhf.cluster.ray_runtime import RayRuntime
from asyncrlhf.config.compose import load_config
from asyncrlhf.errors import ConfigError


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two network cards, the second of which Ray knows this node by."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    found = {"lo": "127.0.0.1", "ib0": "10.1.0.7", "eth0": "192.168.0.7"}
    addresses = {name: [SimpleNamespace(address=address)] for name, address in found.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)


@pytest.mark.parametrize(
    ("address", "before", "after"),
    [
        ("10.1.0.7", None, "ib0"),
        ("10.1.0.7", "eth0", "eth0"),  # the user knows better
        ("127.0.0.1", None, None),  # a Ray of this machine alone
        ("10.9.9.9", None, None),  # behind an address translation: gloo's own choice is as good
    ],
)
def test_gloo_takes_the_card_of_rays_address(
    address: str, before: str | None, after: str | None, cards: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where.ray.util, "get_node_ip_address", lambda: address)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", before or "")  # so that the variable is put back afterwards
    if before is None:
        del os.environ["GLOO_SOCKET_IFNAME"]
    where.name_interface()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == after


class Learner:
    """Ranks on two machines, one of which does not see the folder."""

    def __init__(self, blind: list[str]) -> None:
        self._blind = blind

    async def blind(self, folder: Path) -> list[str]:
        return self._blind


async def test_a_run_directory_that_the_learner_does_not_see_is_refused(tmp_path: Path) -> None:
    runtime = build_runtime(load_config([]), tmp_path)
    assert isinstance(runtime, RayRuntime)
    runtime.learner = Learner([])  # type: ignore[assignment]
    await runtime._check_run_dir()
    runtime.learner = Learner(["10.0.0.2", "10.0.0.3"])  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"does not exist on the learner's machine 10.0.0.2, 10.0.0.3.*all nodes"):
        await runtime._check_run_dir()


SHARES = ("generator.gpus=0.5", "learner.gpus=0.5")
TURNS = ("cluster=flatten", "generator.gpus=1", "learner.gpus=1")


@pytest.mark.parametrize(
    ("words", "own", "transport"),
    [
        ((), True, "shared_memory"),
        ((), False, "auto"),  # other machines may be there, or join
        (("generator.gpus=1",), True, "auto"),
        (("learner.ranks=2", "learner.sharding=fsdp2"), True, "auto"),
        (("model.lora.r=4",), True, "auto"),
        (("weights.delta=sparse", "weights.checksum=true"), True, "auto"),
        (("weights.transport=collective",), True, "collective"),
        (("weights.transport=shared_memory",), False, "shared_memory"),
        (("cluster=one_gpu",), True, "cuda_ipc"),
        (("cluster=one_gpu",), False, "cuda_ipc"),  # the plan reserves one card for them, wherever it is
        (("cluster=one_gpu", "generator.replicas=2", "generator.gpus=0.2"), True, "cuda_ipc"),
        (("cluster=one_gpu", "model.lora.r=4"), True, "auto"),
        (("cluster=one_gpu", "weights.delta=sparse"), True, "auto"),
        (("cluster=one_gpu", "weights.transport=collective"), True, "collective"),
        (SHARES, True, "auto"),  # of one GPU today, perhaps
        (("learner.gpus=1",), True, "auto"),  # the generator is on the CPU
        (TURNS, True, "auto"),
    ],
)
def test_weights_are_mapped_where_all_parts_share_a_machine_or_a_card(
    words: tuple[str, ...], own: bool, transport: str
) -> None:
    runtime: Any = build_runtime(load_config([*words]))
    runtime._own_ray = object() if own else None
    runtime._placer = SimpleNamespace(plan=make_plan(runtime._cluster.placement, runtime._parts, nodes=1))
    runtime._choose_transport()
    specs = [*runtime._specs.generators, runtime._specs.learner]
    assert {spec.weights.transport for spec in specs} == {transport}
    assert runtime.maps == (transport in ("shared_memory", "cuda_ipc"))


async def test_on_one_gpu_each_engine_starts_when_all_before_it_stand() -> None:
    """vLLM measures the free memory when it starts: a part that allocates meanwhile would be taken for its own."""
    words = ("cluster=one_gpu", "generator.replicas=3", "generator.gpus=0.15")
    runtime: Any = build_runtime(load_config([*words]))
    events: list[str] = []

    class Starting:
        def __init__(self, name: str) -> None:
            events.append(f"{name} begins")
            self.name = name

        async def ready(self) -> None:
            await asyncio.sleep(0.01)
            events.append(f"{self.name} stands")

    runtime._generator = lambda spec: Starting(spec.name)
    await runtime._start_in_line([Starting("learner")])
    names = ["learner", *(f"generator-{i}" for i in range(3))]
    assert events == [f"{name} {what}" for name in names for what in ("begins", "stands")]
    assert [g.name for g in runtime.generators] == names[1:]


def test_rays_own_variable_names_a_cluster_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert load_config([]).ray.cluster == "head:6379"
    assert load_config(["ray.address=other:1"]).ray.cluster == "other:1"
    monkeypatch.delenv("RAY_ADDRESS")
    assert load_config([]).ray.cluster == ""


class StandIn:
    """In place of a Ray."""

    def __init__(self, *size: object) -> None:
        self.size, self.stopped = size, False

    def stop(self) -> None:
        self.stopped = True


def test_a_kept_ray_is_lent_to_a_run_of_its_size_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_ray, "OwnRay", StandIn)
    monkeypatch.setattr(own_ray._Kept, "asked", False)
    alone = own_ray.lend(2, 100)
    own_ray.give_back(alone)
    assert alone.stopped and not own_ray.is_kept(), "nobody asked for it to be kept"
    own_ray.keep_for_next()
    first = own_ray.lend(2, 100)
    assert not own_ray.is_kept(), "a run may use a Ray of its own while another's is in use"
    own_ray.give_back(first)
    assert own_ray.lend(2, 100) is first and not first.stopped
    own_ray.give_back(first)
    other = own_ray.lend(4, 100)
    assert first.stopped and other is not first
    own_ray.give_back(other)
    own_ray.stop_kept()
    assert other.stopped and not own_ray.is_kept()
