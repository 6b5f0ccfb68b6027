"""Ray workers forked from one process that has imported the stack.

An actor imports torch, transformers and this package: four seconds of a processor, for each of five actors or more. A
Ray that starts under :meth:`ForkedWorkers.serving` gets a command in place of the Python interpreter. For a worker, the
command passes its arguments, environment and output files to a server, which forks; the child runs Ray's own worker
script, unchanged. For anything else, or without a server, the command becomes the interpreter.

On a machine with GPUs too: none of these imports touches a device. A library that did would make it unusable in every
fork, so the server looks what it has open: with a device of the machine it declines every call, and says so.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from asyncrlhf.garbage import rare_collections
from asyncrlhf.scratch import Scratch

WORKER = "default_worker.py"
# Ray's agents, which end at once with its node process, their parent.
AGENTS, PARENT_DEATH = ("/dashboard/agent.py", "/agent/main.py"), 1  # of prctl(2)
# Before the first call, while Ray starts. torch._dynamo: every optimizer of torch imports it. pandas: pyarrow imports
# it with its first array, which would stop a learner for 0.2 s amid its training, when it first writes records.
FIRST = (
    "torch",
    "torch._dynamo",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "pyarrow.parquet",
    "pandas",
)
# With the environment of the first call: Ray's extension reads its settings once, at its import.
THEN = tuple(f"asyncrlhf.actors.{name}" for name in ("generator", "learner", "annotator", "model_annotators"))
# An argument of the script that Ray puts before the worker's if an actor has a runtime environment. That script sets
# variables and becomes the worker. A fork sets them as well, but EARLY ones need a new process.
CONTEXT = "--serialized-runtime-env-context="
EARLY = ("PYTHON", "LD_", "OMP_", "GOMP_", "MKL_")
# The first call's job is not that of later forks: with this, a worker learns of its job with its first task.
NO_JOB = {"RAY_JOB_ID": "ffffffff"}
# Without it pyarrow's jemalloc starts a thread of its own, of which forks have no copy anyway: the server is to fork
# with one thread. The threads of OpenBLAS, in numpy and scipy, end before a fork by handlers of their own.
NO_THREAD = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
# Isolated and without site-packages, so that it takes milliseconds.
COMMAND = """#!{python} -IS
import json, os, socket, sys
def forks():
    if not any(word.endswith({worker!r}) for word in sys.argv[1:4]):
        return False
    context = [word[len({context!r}):] for word in sys.argv if word.startswith({context!r})]
    asked = json.loads(context[0]) if context else dict()
    other = asked.get("command_prefix") or asked.get("override_worker_entrypoint")
    late = any(n.startswith({early!r}) and os.environ.get(n) != v for n, v in asked.get("env_vars", dict()).items())
    return not (other or late) and asked.get("py_executable") in (None, "", {python!r})
if forks():
    try:
        server = socket.socket(socket.AF_UNIX)
        server.settimeout({patience})
        server.connect({path!r})
        socket.send_fds(server, [b"-"], [0, 1, 2])
        with server.makefile("rw") as stream:
            json.dump([sys.argv[1:], dict(os.environ), os.getcwd(), os.getpgid(0)], stream)
            stream.write("\\n")
            stream.flush()
            if stream.readline():
                os._exit(0)
    except OSError:
        pass
if any(word.endswith({agents!r}) for word in sys.argv[1:4]):
    import ctypes
    ctypes.CDLL(None).prctl({parent_death}, {kill}, 0, 0, 0)
os.execv({python!r}, [{python!r}, *sys.argv[1:]])
"""
# glibc gives freed memory back to the system after every step and takes it again page by page at the next; with these
# the actors of a local run keep it (measured: a fifth more samples/s on the tiny model). Read when a process starts.
MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(10**9),
    "MALLOC_TRIM_THRESHOLD_": str(2 * 10**9),
    "MALLOC_TOP_PAD_": str(10**8),
}
HARMLESS = ("/dev/null", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/pts/", "/dev/shm/")
DECLINED = "Ray's workers are not forked, and start later: a library that they import has opened {devices}."
PREFIX = "asyncrlhf-forks-"
PATIENCE_SECONDS = 60.0  # for a fork, of which the first waits for the imports


class ForkedWorkers:
    """A server of forks, and the command for Ray, which are in a temporary folder until :meth:`close`."""

    def __init__(self) -> None:
        self._scratch = Scratch(PREFIX)
        self._command, path = self._scratch.path / "python", str(self._scratch.path / "forks")
        words = {"python": sys.executable, "worker": WORKER, "path": path, "patience": PATIENCE_SECONDS}
        words |= {"context": CONTEXT, "early": EARLY}
        words |= {"agents": AGENTS, "parent_death": PARENT_DEATH, "kill": int(signal.SIGKILL)}
        self._command.write_text(COMMAND.format(**words))
        self._command.chmod(0o755)
        self.environment = _environment()
        line = [sys.executable, "-m", __name__, path]
        with deaf():
            self.server = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self.environment)
        assert self.server.stdout is not None
        self.server.stdout.readline()  # it listens, and imports while Ray starts

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """A Ray that is started while this holds forks its workers."""
        python, sys.executable = sys.executable, str(self._command)
        try:
            yield
        finally:
            sys.executable = python

    def close(self) -> None:
        """End the server, as the end of this process does; workers live on. One that is importing ends at once."""
        assert self.server.stdin is not None and self.server.stdout is not None
        self.server.terminate()
        self.server.stdin.close()
        self.server.stdout.close()
        self.server.wait()
        self._scratch.close()


class _Begun:
    """What :func:`begin` started, until it is taken."""

    workers: ForkedWorkers | None = None


def begin() -> None:
    """Start a server for the next :func:`take` of this process: it imports while this process does (measured on two
    cores: the first step ends after 14 s in place of 18). Not on one core, where the two would only take turns."""
    if _Begun.workers is None and (os.cpu_count() or 1) > 1:
        _Begun.workers = ForkedWorkers()


def take() -> ForkedWorkers:
    """A server for a Ray: the one that was begun, if it would be the same today, or a new one."""
    begun, _Begun.workers = _Begun.workers, None
    if begun is None:
        return ForkedWorkers()
    if _serves(begun.environment, _environment()):
        return begun
    begun.close()
    return ForkedWorkers()


def drop() -> None:
    """End the server that was begun and not taken, if there is one."""
    begun, _Begun.workers = _Begun.workers, None
    if begun is not None:
        begun.close()


def _environment() -> dict[str, str]:
    """Of a server that starts now."""
    path = os.pathsep.join(path for path in sys.path if path)
    return {**MALLOC, **os.environ, **NO_THREAD, "PYTHONPATH": path}


def _serves(begun: dict[str, str], today: dict[str, str]) -> bool:
    """Whether a server of the environment ``begun`` serves as one of ``today`` would. What imports and CUDA's start add
    to this process meanwhile comes with each call; only a process's start reads the rest."""
    added = [name for name in today.keys() - begun.keys() if name.startswith((*EARLY, *MALLOC))]
    changed = [name for name, value in begun.items() if name != "PYTHONPATH" and today.get(name) != value]
    known = set(today["PYTHONPATH"].split(os.pathsep))  # Ray's import adds a folder
    return not added and not changed and known.issuperset(begun["PYTHONPATH"].split(os.pathsep))


@contextlib.contextmanager
def deaf() -> Iterator[None]:
    """Processes that start meanwhile are deaf to the signals by which SLURM warns all processes of a job's step: only
    the driver acts on them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def serve(path: str) -> Call | None:
    """Fork a worker for each call at the socket ``path``, until standard input is closed. In the worker, returns the
    call, so that nothing of the server is left below it on the stack."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen(128)
    print("listening", flush=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # leaves no zombies
    devices: list[str] = []
    with rare_collections():
        for name in FIRST:
            importlib.import_module(name)
    while sys.stdin not in select.select([sys.stdin, listening], [], [])[0]:
        caller, _ = listening.accept()
        with contextlib.suppress(OSError, ValueError):  # the caller has gone, or Ray has ended it
            _, files, _, _ = socket.recv_fds(caller, 1, 3)
            words, environment, folder, group = json.loads(caller.makefile().readline())
            if THEN[0] not in sys.modules:
                _import_rest(environment)
                devices = opened_devices()
                if devices:
                    print(DECLINED.format(devices=", ".join(devices)), file=sys.stderr, flush=True)
            if not devices and os.fork() == 0:
                listening.close()
                return Call(words, environment, folder, group, files, caller)
            for file in files:
                os.close(file)
        caller.close()
    return None


def opened_devices() -> list[str]:
    """The devices under /dev that this process has open, but for terminals, random numbers and shared memory."""
    with os.scandir("/proc/self/fd") as files:
        opened = {os.path.realpath(file.path) for file in files}
    return sorted(path for path in opened if path.startswith("/dev/") and not path.startswith(HARMLESS))


@dataclass(frozen=True)
class Call:
    """A worker that Ray asks for. ``words``: arguments of Python; ``group``: the process group that Ray ends with it;
    ``files``: its standard input, output and error; ``caller``: the socket of the command, which waits for a line."""

    words: list[str]
    environment: dict[str, str]
    folder: str
    group: int
    files: list[int]
    caller: socket.socket


def _import_rest(environment: dict[str, str]) -> None:
    assert "ray" not in sys.modules
    os.environ.update({**environment, **NO_JOB})
    with rare_collections():
        for name in THEN:
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the collector would write to every page that forks share


def work(call: Call) -> None:
    """Become the process that Ray asked for, in a fork of the server."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        os.setpgid(0, call.group)
        call.caller.sendall(b"forked\n")
    except OSError:  # Ray has ended the command that asked, and its process group with it
        os._exit(0)
    call.caller.close()
    for number, file in enumerate(call.files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(call.environment)
    os.chdir(call.folder)
    random.seed()
    script = next(number for number, word in enumerate(call.words) if word.endswith(WORKER))
    for context in [word.removeprefix(CONTEXT) for word in call.words if word.startswith(CONTEXT)]:
        importlib.import_module("ray._private.utils").update_envs(json.loads(context).get("env_vars", {}))
    sys.argv = [word for word in call.words[script:] if not word.startswith((CONTEXT, "--language="))]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__" and (asked := serve(sys.argv[1])):
    work(asked)
