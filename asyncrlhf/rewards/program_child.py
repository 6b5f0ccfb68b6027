"""The process around a program that a model wrote: ``python -m`` this module with ``MEMORY_GB``, the program as input.

The program is the third process: this one enters namespaces, the second is the first process of the program's own
list of processes, so that the kernel ends all the others with it, those in other sessions too.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path

from asyncrlhf.rewards.confinement import NEW_NET, end_with_the_parent, enter, limit_memory_and_files

FOLDER = "/dev/shm"  # which every Linux has: for the program an empty folder in memory, and all that it may write to
FOLDER_BYTES = OUTPUT_BYTES = 2**26  # the second: what it may print; of no larger file, too
NEW_FILES, NEW_PROCESSES = 0x20000, 0x20000000  # of unshare(2)
RECURSIVE, PRIVATE = 0x4000, 0x40000  # of mount(2)
DROP_CAPABILITY, NO_NEW_RIGHTS, CAPABILITIES = 24, 38, 64  # of prctl(2)
SET_ATTRIBUTES, HERE, ALL_BELOW, READ_ONLY = 442, -100, 0x8000, 1  # of mount_setattr(2)


def main(memory_gb: float) -> None:
    code = sys.stdin.buffer.read()
    limit_memory_and_files(memory_gb, OUTPUT_BYTES)
    end_with_the_parent()
    try:
        enter(NEW_NET | NEW_FILES | NEW_PROCESSES)
        _hide_files()
    except OSError as error:
        sys.exit(f"the kernel of this machine gives no namespaces here ({error.strerror})")
    file = Path(FOLDER, "program.py")
    file.write_bytes(code)
    os._exit(_forked(lambda: _first_process(file)))


def _hide_files() -> None:
    """Files are read-only in this process's view, but for an empty FOLDER. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    _checked(libc.mount(b"none", b"/", None, PRIVATE | RECURSIVE, None))
    attributes = struct.pack("QQQQ", READ_ONLY, 0, 0, 0)
    _checked(libc.syscall(SET_ATTRIBUTES, HERE, b"/", ALL_BELOW, attributes, len(attributes)))
    _checked(libc.mount(b"tmpfs", FOLDER.encode(), b"tmpfs", 0, f"size={FOLDER_BYTES}".encode()))


def _checked(answer: int) -> None:
    if answer != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _first_process(file: Path) -> None:
    end_with_the_parent()
    # The other processes' environments; a container's own list may not be covered.
    ctypes.CDLL(None).mount(b"proc", b"/proc", b"proc", 0, None)
    os._exit(_forked(lambda: _program(file)))


def _program(file: Path) -> None:
    libc = ctypes.CDLL(None)
    for capability in range(CAPABILITIES):  # or root, also that of a user namespace, would mount the files anew
        libc.prctl(DROP_CAPABILITY, capability, 0, 0, 0)
    libc.prctl(NO_NEW_RIGHTS, 1, 0, 0, 0)
    os.chdir(FOLDER)
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    own = {"HOME": FOLDER, "TMPDIR": FOLDER, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    left = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    os.execve(sys.executable, [sys.executable, "-I", str(file)], {**left, **own})


def _forked(action: Callable[[], None]) -> int:
    """The exit code of a process that does only ``action``; 128 more than the signal that ended it."""
    child = os.fork()
    if child == 0:
        try:
            action()
        finally:
            os._exit(1)
    while True:
        ended, status = os.wait()  # also what the program left behind, which would else stay in the list of processes
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


if __name__ == "__main__":
    main(float(sys.argv[1]))
