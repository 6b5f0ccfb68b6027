"""Programs of a model: what they print comes back, and hostile ones end without a trace."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from asyncrlhf.rewards.program import Ran, run_program
from tests.ray_run import wait_until

SECONDS = 30.0
NAMED = "a-hostile-process"  # in the command lines of what the programs start

try:
    TRIED = run_program("print(1)", 60.0)
except OSError as error:
    TRIED = Ran(str(error), failed=True)
pytestmark = pytest.mark.skipif(TRIED.failed, reason=f"no programs here: {TRIED.text}")


def left() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if NAMED in " ".join(process.info["cmdline"] or ()) and process.pid != os.getpid():
            found.append(process)
    return found


def test_what_a_program_prints_comes_back() -> None:
    assert run_program("import math\nprint(math.comb(10, 3))\nprint('é', end='')", SECONDS) == Ran("120\né", False)
    assert run_program("x = 1", SECONDS) == Ran("", False)
    assert run_program("import numpy\nprint(int(numpy.arange(5).sum()))", SECONDS) == Ran("10\n", False)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("1/0", "ZeroDivisionError: division by zero"),
        ("def f(:", "SyntaxError: invalid syntax"),
        ("print('x')\nraise SystemExit(3)", "the program ended with exit code 3"),
        ("import os\nos._exit(7)", "the program ended with exit code 7"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "the program was ended by SIGKILL"),
        ("import ctypes\nctypes.string_at(0)", "the program was ended by SIGSEGV"),
        ("x = bytearray(2**33)", "MemoryError"),
        ("while True: print('endless ' * 1000)", "the program was ended: it printed more than 64 MiB"),
        ("import sys\nwhile True: sys.stderr.write('x' * 99999)", "the program was ended: it printed more than 64 MiB"),
        ("input()", "EOFError: EOF when reading a line"),
        ("print('\\ud800')", "UnicodeEncodeError: 'utf-8' codec can't encode character"),
        ("raise ValueError('a' * 9999)", "ValueError: aaaa"),
    ],
)
def test_a_failed_program_says_why_in_one_short_line(code: str, said: str) -> None:
    ran = run_program(code, SECONDS)
    assert ran.failed and ran.text.startswith(said) and len(ran.text) <= 1000 and "\n" not in ran.text


@pytest.mark.parametrize(
    "code", ["while True: pass", "import time\ntime.sleep(600)", "import re\nre.match('(a+)+$', 'a' * 60 + 'b')"]
)
def test_a_program_that_does_not_end_is_ended(code: str) -> None:
    began = time.monotonic()
    assert run_program(code, 0.5) == Ran("the program was ended: it took longer than 0.5 s", True)
    assert time.monotonic() - began < 5.0


FORKS = f"""
import os, sys, time, subprocess
while True:
    try:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "{NAMED}"])
        os.fork()
    except OSError:
        time.sleep(0.01)
"""
ESCAPES = f"""
import os, sys, subprocess
for _ in range(3):
    subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)", "{NAMED}"], start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )
print("left")
"""


def test_a_fork_bomb_ends_with_all_its_processes() -> None:
    ran = run_program(FORKS, SECONDS)
    assert ran.failed and "it started more than 16 processes" in ran.text
    wait_until(lambda: not left(), "the end of the forks")


def test_processes_in_other_sessions_end_with_a_program_that_leaves_them() -> None:
    """It ends itself at once and in order: there is no later moment at which they could be found below it."""
    assert run_program(ESCAPES, SECONDS) == Ran("left\n", False)
    wait_until(lambda: not left(), "the end of what was left")


def test_they_end_with_the_worker_too() -> None:
    hangs = ESCAPES + "import time\ntime.sleep(600)"
    code = f"from asyncrlhf.rewards.program import run_program\nrun_program({hangs!r}, 600)"
    worker = subprocess.Popen([sys.executable, "-c", code])
    wait_until(lambda: len(left()) >= 3, "the processes' beginning")
    worker.kill()
    worker.wait()
    wait_until(lambda: not left(), "the end of the orphans")


def test_a_program_reaches_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ran = run_program(f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}))", SECONDS)
    assert ran.failed and "unreachable" in ran.text


def test_a_program_can_neither_write_files_nor_see_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "planted-key")
    mine = tmp_path / "checkpoint"
    mine.write_text("weights")
    assert "Read-only file system" in run_program(f"open({str(mine)!r}, 'w')", SECONDS).text
    assert "Read-only file system" in run_program(f"import os\nos.remove({str(mine)!r})", SECONDS).text
    assert mine.read_text() == "weights"
    own = "import os\nopen('note', 'w').close()\nprint(os.getcwd(), sorted(os.listdir()), os.getenv('SOME_API_KEY'))"
    assert run_program(own, SECONDS).text == "/dev/shm ['note', 'program.py'] None\n"
    assert run_program("import os\nprint('note' in os.listdir('/dev/shm'))", SECONDS).text == "False\n"
    kill = f"import os, signal\nos.kill({os.getpid()}, signal.SIGKILL)"
    assert run_program(kill, SECONDS) == Ran("ProcessLookupError: [Errno 3] No such process", True)
    full = "f = open('big', 'wb')\nwhile True: f.write(bytes(2**20))"
    assert run_program(full, SECONDS).text.startswith("OSError: [Errno ")


REFUSING = """
from asyncrlhf.rewards import program_child

def enter(spaces):
    raise OSError(1, "Operation not permitted")

program_child.enter = enter
program_child.main(2.0)
"""


WRITES_AGAIN = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
remount, bind, private, user, files = 32, 4096, 0x44000, 0x10000000, 0x20000
for spaces in (0, user | files):
    uid = os.getuid()
    if spaces and libc.unshare(spaces) == 0:
        open("/proc/self/setgroups", "w").write("deny")
        open("/proc/self/uid_map", "w").write(f"0 {{uid}} 1")
    libc.mount(b"none", b"/", None, private, None)
    libc.mount(b"none", b"/", None, remount | bind, None)
    libc.syscall(442, -100, b"/", 0x8000, (ctypes.c_uint64 * 4)(0, 1, 0, 0), 32)
    libc.umount2(b"/dev/shm", 2)
    try:
        open({file!r}, "w").write("mine")
    except OSError as error:
        print(error.strerror)
"""


def test_a_program_cannot_take_its_limits_away(tmp_path: Path) -> None:
    """Not as root either, nor as the root of a user namespace that it makes itself."""
    mine = tmp_path / "checkpoint"
    mine.write_text("weights")
    ran = run_program(WRITES_AGAIN.format(file=str(mine)), SECONDS)
    assert mine.read_text() == "weights" and "Read-only file system" in ran.text, ran


def test_where_a_kernel_gives_no_namespaces_nothing_runs() -> None:
    done = subprocess.run([sys.executable, "-c", REFUSING], input="print(1)", capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.strip() == "the kernel of this machine gives no namespaces here (Operation not permitted)"
