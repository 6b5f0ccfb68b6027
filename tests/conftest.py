"""Settings and fixtures that every test shares: no network, one thread, one small Ray for the session."""

from __future__ import annotations

import os
from pathlib import Path

# Before any library reads them: tests never reach a network, and two threads a process would fight over two cores.
# `make test-numeric` asks for two all the same, by TEST_THREADS: they add in another order.
os.environ.update(
    {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_process_group_cleanup_enabled": "1",  # as in a Ray that a run starts
        "RAY_worker_niceness": "0",  # 15 is Ray's own: its actors would starve beside another process of tests
        "OMP_NUM_THREADS": os.environ.get("TEST_THREADS", "1"),
        "MKL_NUM_THREADS": os.environ.get("TEST_THREADS", "1"),
        "MPLBACKEND": "Agg",
        # The temporary folder of a session goes with it; what vLLM compiles takes half a minute of a processor.
        "TORCHINDUCTOR_CACHE_DIR": str(Path(__file__).resolve().parents[1] / ".pytest_cache" / "torchinductor"),
    }
)
if os.environ.get("ATEN_CPU_CAPABILITY") == "default":
    # torch's compiler, which vLLM asks, writes vector code whose types torch then does not declare.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"

import gc
import signal
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import hypothesis
import pytest
import torch

from asyncrlhf.garbage import keep_existing

# A killed process loses nothing that it wrote, and no test takes a machine's power away: the tests' own process
# would wait for the disk at each of them.
os.fsync = lambda descriptor: None

# How long an example takes says how busy the machine is, and nothing else.
hypothesis.settings.register_profile("asyncrlhf", deadline=None)
hypothesis.settings.load_profile("asyncrlhf")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

pytest_plugins = ["tests.leftovers", "tests.numeric", "tests.selection"]  # --margins is of numeric

ROOT = Path(__file__).resolve().parents[1]
OBJECT_STORE_BYTES = 256 * 2**20
IMPORTED = pytest.StashKey[int]()  # modules at the last look


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where tests run in several processes: those of one file stay together, for they share what is costly to make, and
    so do all files that share Ray, all that import vLLM, and all that ask the other implementations."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return shared_with(super()._split_scope(nodeid))

    return Scheduling(config, log)


@cache
def shared_with(file: str) -> str:
    if file.startswith("tests/references/"):
        return "references"
    text = (ROOT / file).read_text()
    return "ray" if "ray_local" in text else "vllm" if "vllm_tiny" in text else file


def pytest_configure(config: pytest.Config) -> None:
    """A shell that starts tests in the background has them ignore Ctrl-C, and `nohup` a hang-up; the commands that
    tests start would inherit that, and rightly ignore what is sent to them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def pytest_unconfigure() -> None:
    """pytest looks for garbage five times at its end, among all objects of the libraries: 20 s on a slow machine."""
    keep_existing()


@pytest.fixture(autouse=True)
def collections_of_garbage_pass_over_the_libraries(pytestconfig: pytest.Config) -> None:
    """DeepSpeed collects for each engine of ZeRO-3, and each time Python would look at the million objects of torch,
    transformers and vLLM."""
    imported = len(sys.modules)
    if imported > pytestconfig.stash.get(IMPORTED, 0) + 100:
        gc.collect()
        keep_existing()
        pytestconfig.stash[IMPORTED] = imported


RANKS = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def ranks_are_forgotten() -> Iterator[None]:
    """DeepSpeed and accelerate leave these behind, and accelerate would look for the other ranks in a later test."""
    yield
    for name in RANKS:
        os.environ.pop(name, None)


@pytest.fixture(autouse=True)
def the_process_is_left_as_it_was() -> Iterator[None]:
    """A test that lowers its process's priority, or takes cores from it, makes all later ones slow: nothing fails, and
    a test of 10 s takes two minutes."""
    before = _of_the_process()
    yield
    assert _of_the_process() == before, "(niceness, cores, torch's threads) of the process of the tests"


def _of_the_process() -> tuple[int, set[int], int]:
    return os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0), torch.get_num_threads()


@pytest.fixture(scope="session")
def tiny_model_path() -> Path:
    """Folder of the packaged tiny checkpoint: a Llama with a character tokenizer, loaded by ``from_pretrained``."""
    import asyncrlhf

    path = Path(asyncrlhf.__file__).parent / "assets" / "tiny-arithmetic"
    if not (path / "config.json").is_file():
        pytest.fail(f"the packaged checkpoint is missing: {path}")
    return path


@pytest.fixture(scope="session")
def ray_local() -> Iterator[Any]:
    """The ``ray`` module, started once: 4 logical CPUs, a small object store, a temporary folder of its own; as a run
    starts it, so that its workers are forks and an actor costs no imports."""
    import ray

    from asyncrlhf.cluster.own_ray import OwnRay

    own = OwnRay(4, OBJECT_STORE_BYTES, configure_logging=False)
    yield ray
    own.stop()
