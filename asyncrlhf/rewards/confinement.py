"""What a process in a sandbox gives up: memory, the network, life after its parent.

Its imports are light, because every program of a model starts with them."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrlhf.errors import ConfigError

if TYPE_CHECKING:
    from asyncrlhf.rewards.reward_config import SandboxConfig

WATCH_SECONDS = 0.25
PR_SET_PDEATHSIG, SUBREAPER = 1, 36  # of prctl(2)
# Of a reward function: far above what one needs, far below a full disk or what Linux lets a process hold open.
FILE_BYTES, OPEN_FILES = 2**30, 1024
NEW_USER, NEW_NET = 0x10000000, 0x40000000  # of unshare(2)


def confine(config: SandboxConfig) -> None:
    """Limit this process and its future children; call it before there are threads. Raises ConfigError
    if the network cannot be removed here."""
    if not config.network:
        try:
            enter(NEW_NET)
        except OSError as error:
            raise ConfigError(
                "reward.sandbox.network=false is not possible on this machine, whose kernel provides no network "
                f"namespace ({error.strerror}); allowed here: true."
            ) from error
    with suppress(OSError, AttributeError):  # Linux only; not essential elsewhere
        ctypes.CDLL(None, use_errno=True).prctl(SUBREAPER, 1, 0, 0, 0)
    limit_memory_and_files(config.memory_gb, FILE_BYTES)


def limit_memory_and_files(memory_gb: float, file_bytes: int) -> None:
    """``memory_gb``: of address space, in GiB; ``file_bytes``: of one file."""
    _limit(resource.RLIMIT_AS, int(memory_gb * 2**30))
    _limit(resource.RLIMIT_FSIZE, file_bytes)
    _limit(resource.RLIMIT_NOFILE, OPEN_FILES)
    _limit(resource.RLIMIT_CORE, 0)


def _limit(kind: int, value: int) -> None:
    """Lower a limit permanently; 0 means no limit, except for core dumps."""
    _, hard = resource.getrlimit(kind)
    if value or kind == resource.RLIMIT_CORE:
        wanted = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (wanted, wanted))


def enter(spaces: int) -> None:
    """Enter new namespaces of these kinds, such as a network without active interfaces; without root in a user
    namespace. Raises OSError where the kernel gives none."""
    libc, user, group = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
    if libc.unshare(spaces) == 0:
        return
    if libc.unshare(NEW_USER | spaces) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        Path(f"/proc/self/{name}").write_text(text)


def guard(descriptor: int, folder: str) -> None:
    """Start a process that ends the function's children if only this process is killed, as Ray does with the children
    of an actor that it ends. Call it before there are threads."""
    watched = os.getpid()
    if os.fork() == 0:
        os.close(descriptor)  # or the other end would not notice this process's end
        _end_with(watched, folder)


def _end_with(parent: int, folder: str) -> None:
    """End this process, its folder and all the function's children as soon as the parent has ended."""
    while os.getppid() == parent:
        time.sleep(WATCH_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def end_with_the_parent() -> None:
    """Have the kernel kill this process when its parent ends: a function that hangs would outlive it, and if it holds
    Python's global lock (an endless regular expression), no thread here could notice. The guard then ends the rest."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
