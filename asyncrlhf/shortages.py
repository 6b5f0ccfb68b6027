"""What a machine may lack: the words for it, what helps, and how often the kernel has ended a process for memory."""

from __future__ import annotations

import errno
import re
from contextlib import suppress
from pathlib import Path

THREADS = 0  # Python's error has no errno
# What lacks; the messages of Python, Arrow, Rust (safetensors), C++ and torch; and what helps.
SHORTAGES = {
    errno.ENOSPC: ("The disk is full", r"No space left on device|StorageFull", "with room"),
    errno.EDQUOT: ("The disk quota is used up", r"Disk quota exceeded|QuotaExceeded", "with room"),
    errno.EROFS: ("The disk is read-only", r"Read-only file system|ReadOnlyFilesystem", "once it can be written"),
    errno.EIO: ("The disk fails", r"Input/output error", "on a disk that works"),
    errno.EMFILE: ("Too many files are open", r"Too many open files", "with a higher `ulimit -n`"),
    THREADS: ("No more threads can start", r"can't start new thread", "with a higher `ulimit -u` or pids limit"),
    errno.ENOMEM: ("Memory is short", r"(an't|annot) allocate memory|bad_alloc|ut of memory", "{part}"),
}
OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
# What makes a part smaller, by the beginning of its name.
SMALLER = {
    "learner": "with a smaller learner.token_budget, or a learner.sharding over more learner.ranks",
    "generator": "with fewer generator.slots",
    "reward": "with fewer reward.workers, or a smaller reward.max_batch_tokens",
    "reference": "with fewer reference.workers, or a smaller reference.token_budget",
    "critic": "with fewer critic.workers, or a smaller critic.token_budget",
    "episode": "with fewer episode.workers",
    "the record writer": "with a smaller logging.flush_every",
}
ANY = "with a smaller buffer.capacity, learner.token_budget or generator.slots"
MEMORY_EVENTS = ("/sys/fs/cgroup/memory.events", "/proc/vmstat")


def found_in(text: str) -> int | None:
    """The key in ``SHORTAGES`` of what the message of another library says."""
    return next((code for code, (_, said, _) in SHORTAGES.items() if re.search(said, text)), None)


def smaller(part: str) -> str:
    """What makes a part need less memory; for another name, what may help any."""
    return next((helps for name, helps in SMALLER.items() if part.startswith(name)), ANY)


def memory_kills() -> int:
    """How often the kernel has killed for memory in this process's group, or on this machine."""
    for name in MEMORY_EVENTS:
        with suppress(OSError, ValueError):
            for line in Path(name).read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0
