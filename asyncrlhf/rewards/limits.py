"""Limits of a reward function's process: seconds of CPU, memory, processes, files, network, environment.

They protect the machine from a function's mistakes, not from malice: see docs/security.md.
"""

from __future__ import annotations

import ctypes
import os
import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from asyncrlhf.errors import ConfigError
from asyncrlhf.redaction import is_secret, redact
from asyncrlhf.rewards.reward_config import SandboxConfig

NEW_USER, NEW_NET = 0x10000000, 0x40000000  # of unshare(2)
SUBREAPER = 36  # of prctl(2)
# Of a reward function: far above what one needs, far below a full disk or what Linux lets a process hold open.
FILE_BYTES, OPEN_FILES = 2**30, 1024
NO_NETWORK = "reward.sandbox.network=false"


def environment(config: SandboxConfig, variables: Mapping[str, str]) -> dict[str, str]:
    """``variables`` without those that hold secrets, by their name or by credentials in their value, unless
    ``reward.sandbox.env`` lists them."""
    hidden = (name for name, value in variables.items() if is_secret(name) or redact(value) != value)
    left_out = set(hidden) - set(config.env)
    return {name: value for name, value in variables.items() if name not in left_out}


def confine(config: SandboxConfig) -> None:
    """Limit this process and its future children; call it before there are threads. Raises ConfigError
    if the network cannot be removed here."""
    if not config.network:
        _leave_network()
    with suppress(OSError, AttributeError):  # Linux only; not essential elsewhere
        ctypes.CDLL(None, use_errno=True).prctl(SUBREAPER, 1, 0, 0, 0)
    _limit(resource.RLIMIT_AS, int(config.memory_gb * 2**30))
    _limit(resource.RLIMIT_FSIZE, FILE_BYTES)
    _limit(resource.RLIMIT_NOFILE, OPEN_FILES)
    _limit(resource.RLIMIT_CORE, 0)


def begin_call(config: SandboxConfig) -> None:
    """Start the CPU limit of one call."""
    if config.cpu_seconds:
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + config.cpu_seconds) + 1, hard))


def _limit(kind: int, value: int) -> None:
    """Lower a limit permanently; 0 means no limit, except for core dumps."""
    _, hard = resource.getrlimit(kind)
    if value or kind == resource.RLIMIT_CORE:
        wanted = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (wanted, wanted))


def _leave_network() -> None:
    """Enter a network namespace without active interfaces, in a user namespace without root."""
    libc, user, group = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
    if libc.unshare(NEW_NET) == 0:
        return
    if libc.unshare(NEW_USER | NEW_NET) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise ConfigError(
            f"{NO_NETWORK} is not possible on this machine, whose kernel provides no network namespace ({reason}); "
            "allowed here: true."
        )
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        Path(f"/proc/self/{name}").write_text(text)


def descendants(pid: int) -> Iterator[int]:
    """Processes below ``pid``, as far as the system tells."""
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError, ValueError):  # ended meanwhile
            for child in map(int, file.read_text().split()):
                yield child
                yield from descendants(child)
