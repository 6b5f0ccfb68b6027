"""Plants the faults of places/*.yaml one by one and records which of them the tests find, and how fast.

python experiments/32_mutations/measure.py run OUT.csv [--tree .] [--only PART] [--jobs 2] [--again]
python experiments/32_mutations/measure.py confirm OUT.csv [--tree .]
python experiments/32_mutations/measure.py compare BEFORE.csv AFTER.csv
python experiments/32_mutations/measure.py sites [--tree .]
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
CPU_SECONDS = 60  # of one process of tests: the same before and after; waiting for other processes costs none
FAR, FAR_SECONDS = 2, 35  # the part of the tests that are runs of the whole, and how much of that is theirs
WALL_SECONDS = 1200  # a fault that has the tests wait forever
WORD = re.compile(r"[A-Za-z_]{4,}")
TEST_SECONDS = 400  # one test; a test that hangs has found the fault
CHOSEN = "not thorough and not vllm and not gpu"
# Ray, vLLM, DeepSpeed and compilers start for longer than a fault may take.
HEAVY = re.compile(r"ray_local|import ray\b|runtime=ray|vllm_tiny|deepspeed_|tests\.ray_run|tests\.hanging|notebook")
LOCAL = re.compile(r"runtime=local|runtime=\"local\"|tests\.loop|LocalRuntime")
# What most tests import; imported once, then inherited by every process of tests.
SHARED = (
    "torch",
    "numpy",
    "pandas",
    "pyarrow.parquet",
    "transformers",
    "hypothesis",
    "hydra",
    "safetensors.torch",
    "pytest",
)
MODELS = (
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.cache_utils",
)
SETTINGS = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True)
class Fault:
    """``old`` occurs once in ``file``, a path under asyncrlhf/; if it has moved, once in the whole package. ``also``:
    other texts that say the same, with their replacements, for a tree in which the place was written anew."""

    id: str
    file: str
    old: str
    new: str
    breaks: str
    also: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Row:
    """``found``: yes, no, or site gone. ``ended`` tells how a fault was missed: all chosen tests ran, or the limit."""

    id: str
    found: str
    first_failure: str
    seconds: float
    tests: int
    files: int
    ended: str


def faults() -> list[Fault]:
    found: list[Fault] = []
    for path in sorted((HERE / "places").glob("*.yaml")):
        for value in yaml.safe_load(path.read_text()):
            also = tuple((pair["old"], pair["new"]) for pair in value.pop("also", []))
            found.append(Fault(**value, also=also))
    twice = [name for name, count in Counter(fault.id for fault in found).items() if count > 1]
    if twice:
        raise SystemExit(f"these ids are given twice: {twice}")
    return found


def site(fault: Fault, package: Path) -> tuple[Path, str] | None:
    """The file that holds the fault's text, and the file's text with the fault; None if the text is nowhere."""
    for old, new in ((fault.old, fault.new), *fault.also):
        first = package / fault.file
        for path in [first, *(other for other in sorted(package.rglob("*.py")) if other != first)]:
            text = path.read_text() if path.exists() else ""
            if text.count(old) == 1:
                return path, text.replace(old, new)
    return None


def tests_for(fault: Fault, module: str, tree: Path) -> list[list[str]]:
    """The test files for a fault in a module such as ``asyncrlhf.buffer.replay``, in the order in which they run, in
    three parts: each is imported only if those before it found nothing.

    Unit tests that import the module; unit tests that import a module beside it, those of its room, contract tests that
    import its room, or, for a module that no unit test imports, the tests that import its users; then runs of the whole
    in one process. In each part first the files that have most of the rare words of the fault's place. No test and no
    file is named here, so that the rule holds for any set of tests.
    """
    texts = {path: path.read_text() for path in sorted((tree / "tests").rglob("test_*.py"))}
    texts = {path: text for path, text in texts.items() if path.parent != tree / "tests" and "gpu" not in path.parts}
    package = {path: path.read_text() for path in sorted((tree / "asyncrlhf").rglob("*.py"))}
    room, stem = module.rsplit(".", 1)
    top = ".".join(module.split(".")[:2])
    has = {path: set(WORD.findall(text)) for path, text in texts.items()}
    rarity = {
        word: math.log(len(has) / (1 + sum(word in own for own in has.values()))) for word in words_of(fault, stem)
    }

    def order(paths: Iterable[Path]) -> list[Path]:
        score = {path: sum(weight for word, weight in rarity.items() if word in has[path]) for path in paths}
        return sorted(score, key=lambda path: (-score[path], len(texts[path]), path))

    def of(folder: str) -> list[Path]:
        inside = [path for path in texts if path.relative_to(tree / "tests").parts[0] == folder]
        return inside if folder == "contract" else [path for path in inside if not HEAVY.search(texts[path])]

    def imports(text: str, name: str) -> bool:
        parent, _, last = name.rpartition(".")
        return re.search(rf"{re.escape(name)}\b|from {re.escape(parent)} import .*\b{last}\b", text) is not None

    near = [path for path in of("unit") if imports(texts[path], module)]
    far = [path for path in of("integration") if imports(texts[path], module) or LOCAL.search(texts[path])]
    if near:
        beside = [p for p in of("unit") if imports(texts[p], room) or p.parent.name == top.rsplit(".", 1)[-1]]
        beside += [path for path in of("contract") if imports(texts[path], top)]
    else:
        users = [path for path, text in package.items() if imports(text, module)]
        names = [".".join(path.relative_to(tree).with_suffix("").parts) for path in users]
        beside = [p for p in [*of("unit"), *of("contract")] if any(imports(texts[p], name) for name in names)]
    parts = order(near), order(path for path in beside if path not in near), order(far)
    return [[str(path.relative_to(tree)) for path in part] for part in parts]


def words_of(fault: Fault, stem: str) -> set[str]:
    """The words of a fault's place: those of its text, and its module's name."""
    return {*WORD.findall(fault.old), *WORD.findall(fault.id.replace("-", " ")), stem}


def copy_of(tree: Path, folder: Path) -> Path:
    """The tree's files, without what git ignores."""
    listed = ["git", "-C", str(tree), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, capture_output=True, check=True).stdout.decode().split("\0"):
        source = tree / name
        if name and source.is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, folder / name)
    return folder


class Watch:
    """A plugin of pytest: writes the number of tests begun, and the first that failed, to ``path``."""

    def __init__(self, path: Path) -> None:
        self._path, self._begun, self._failed = path, 0, ""

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._begun += 1
        self._path.write_text(f"{self._begun}\n{self._failed}\n{nodeid}")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self._failed:
            self._failed = report.nodeid
            self._path.write_text(f"{self._begun}\n{self._failed}\n{report.nodeid}")

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self._failed:
            self._failed = f"{report.nodeid} (import)"
            self._path.write_text(f"{self._begun}\n{self._failed}\n")


class Broken:
    """A plugin of pytest: writes the files that cannot be imported to ``path``."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            with self._path.open("a") as file:
                file.write(f"{report.nodeid}\n")


def allow(seconds: int) -> None:
    """Let this process use so many seconds of a processor in all; it ends by SIGXCPU then."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, CPU_SECONDS + 5))


def run_tests(copy: Path, parts: Sequence[Sequence[str]], said: Path, options: Sequence[str]) -> int:
    """In a fork of this process: run the tests in ``copy``, part by part until one fails; pytest's exit code."""
    os.setsid()
    allow(CPU_SECONDS)
    for number in (signal.SIGXCPU, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    out = os.open(said.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(copy)
    sys.path[:0] = [str(copy)]
    os.environ["PYTHONPATH"] = str(copy)
    import pytest

    given = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly", f"--timeout={TEST_SECONDS}"]
    given += ["-m", CHOSEN, "--rootdir", str(copy), f"--basetemp={said.with_suffix('.tmp')}", *options]
    watch = Broken(said) if "--collect-only" in options else Watch(said)
    for place, tests in enumerate(parts):
        if not tests:
            continue
        if place == FAR:
            spent = resource.getrusage(resource.RUSAGE_SELF)
            allow(min(CPU_SECONDS, int(spent.ru_utime + spent.ru_stime) + FAR_SECONDS))
        code = int(pytest.main([*given, *tests], plugins=[watch]))
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return code
    return 0


def fork(copy: Path, parts: Sequence[Sequence[str]], said: Path, options: Sequence[str]) -> int:
    """The process id of :func:`run_tests`."""
    process = os.fork()
    if process:
        return process
    code = 70
    try:
        code = run_tests(copy, parts, said, options)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


@dataclass
class Job:
    fault: Fault
    copy: Path
    said: Path
    process: int
    began: float
    restore: tuple[Path, str]
    files: int


class Sound:
    """Which tests of whole runs pass where no fault is planted: one that fails there too finds nothing."""

    def __init__(self) -> None:
        self._passes: set[str] = set()
        self.fails: set[str] = set()

    def check(self, node: str, copy: Path, said: Path) -> bool:
        """Whether ``node`` passes in ``copy``, which has no fault."""
        if node not in self._passes | self.fails:
            _, status = os.waitpid(fork(copy, [[node]], said.with_suffix(".sound"), []), 0)
            (self.fails if status else self._passes).add(node)
        return node in self._passes

    @property
    def left_out(self) -> list[str]:
        """Options for pytest: the functions of tests that fail, with any parameters."""
        return [f"--deselect={function}" for function in sorted({node.split("[")[0] for node in self.fails})]


def broken_files(copy: Path, folder: Path) -> set[str]:
    """The test files that cannot be imported although no fault was planted."""
    every = [str(path.relative_to(copy)) for path in (copy / "tests").rglob("test_*.py")]
    every = [name for name in every if name.split("/")[1] in ("unit", "contract", "integration")]
    said = folder / "collected.txt"
    options = ["--collect-only", "--continue-on-collection-errors"]
    os.waitpid(fork(copy, [every], said, options), 0)
    return set(said.read_text().split()) if said.exists() else set()


def begin(fault: Fault, copy: Path, folder: Path, broken: set[str], sound: Sound) -> Job | Row:
    where = site(fault, copy / "asyncrlhf")
    if where is None:
        return Row(fault.id, "site gone", "", 0.0, 0, 0, "")
    path, text = where
    before = path.read_text()
    path.write_text(text)
    module = ".".join(path.relative_to(copy).with_suffix("").parts)
    parts = [[name for name in part if name not in broken] for part in tests_for(fault, module, copy)]
    said = folder / f"{fault.id}.txt"
    said.unlink(missing_ok=True)
    process = fork(copy, parts, said, ["-x", *sound.left_out])
    return Job(fault, copy, said, process, time.monotonic(), (path, before), sum(map(len, parts)))


def ended(job: Job, status: int | None) -> Row:
    """The row of a job whose process ended with ``status``; None: it was ended at the limit of time."""
    job.restore[0].write_text(job.restore[1])
    shutil.rmtree(job.said.with_suffix(".tmp"), ignore_errors=True)
    lines = job.said.read_text().split("\n") if job.said.exists() else ["0", "", ""]
    failed, last = lines[1], lines[2] if len(lines) > 2 else ""
    code = None if status is None else os.waitstatus_to_exitcode(status)
    how = "all ran" if code == 0 else "limit" if code is None or code == -signal.SIGXCPU else "failed"
    if how == "failed" and not failed:  # the process itself died in this test
        failed = f"{last} (exit {code})"
    seconds = round(time.monotonic() - job.began, 1)
    row = Row(job.fault.id, "yes" if failed else "no", failed, seconds, int(lines[0]), job.files, "" if failed else how)
    print(
        f"{row.id:34} {row.found:4} {row.seconds:6.1f} s {row.tests:4} tests  {row.first_failure or row.ended}",
        flush=True,
    )
    return row


def finished(jobs: list[Job]) -> Iterator[tuple[Job, Row]]:
    """The jobs that have ended, which leave ``jobs``, and their rows."""
    for job in list(jobs):
        process, status = os.waitpid(job.process, os.WNOHANG)
        late = time.monotonic() - job.began > WALL_SECONDS
        if process or late:
            with suppress(ProcessLookupError):
                os.killpg(job.process, signal.SIGKILL)  # and what the tests left behind
            if not process:
                os.waitpid(job.process, 0)
            jobs.remove(job)
            yield job, ended(job, status if process else None)


@contextmanager
def ending(jobs: list[Job]) -> Iterator[None]:
    """At the end of this context the jobs that still run are ended."""
    try:
        yield
    finally:
        for job in jobs:
            with suppress(ProcessLookupError):
                os.killpg(job.process, signal.SIGKILL)


def read(path: Path) -> dict[str, Row]:
    if not path.exists():
        return {}
    with path.open() as file:
        return {row["id"]: Row(**row) for row in csv.DictReader(file)}  # type: ignore[arg-type]


def write(path: Path, rows: dict[str, Row]) -> None:
    order = [fault.id for fault in faults()]
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, [f.name for f in fields(Row)], lineterminator="\n")
        table.writeheader()
        table.writerows(asdict(rows[name]) for name in order if name in rows)


def preload() -> None:
    os.environ.update(SETTINGS)
    for name in SHARED:
        __import__(name)
    wrong = [name for name in sys.modules if name.split(".")[0] in ("asyncrlhf", "tests")]
    if wrong:
        raise SystemExit(f"{wrong[0]} must not be imported before the copies are made.")


def run(args: argparse.Namespace) -> None:
    """Measure the faults that ``args.out`` does not hold yet."""
    rows = {} if args.again else read(args.out)
    todo = [fault for fault in faults() if fault.id not in rows and re.search(args.only, fault.id)]
    preload()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no copy and no test outlives this process
    jobs: list[Job] = []
    sound = Sound()
    with tempfile.TemporaryDirectory(prefix="faults-") as name, ending(jobs):
        folder = Path(name)
        free = [copy_of(args.tree.resolve(), folder / f"copy{number}") for number in range(args.jobs)]
        broken = broken_files(free[0], folder)
        print(f"cannot be imported, and are passed over: {sorted(broken) or 'none'}", flush=True)
        while todo or jobs:
            while todo and free:
                job = begin(todo.pop(0), free[-1], folder, broken, sound)
                if isinstance(job, Row):
                    rows[job.id] = job
                    print(f"{job.id:34} {job.found}", flush=True)
                else:
                    free.pop()
                    jobs.append(job)
            for job, row in finished(jobs):
                far = "tests/integration/" in row.first_failure
                if far and not sound.check(row.first_failure.split(" (")[0], job.copy, job.said):
                    print(f"{row.first_failure} fails without a fault, too.", flush=True)
                    todo.insert(0, job.fault)
                    continue
                rows[row.id] = row
                write(args.out, rows)
            free = [folder / f"copy{n}" for n in range(args.jobs) if folder / f"copy{n}" not in {j.copy for j in jobs}]
            time.sleep(0.1)
    write(args.out, rows)
    print(Counter(row.found for row in rows.values()))


def confirm(args: argparse.Namespace) -> None:
    """Run every test that found a fault on the tree as it is: each must pass there."""
    nodes = sorted({row.first_failure.split(" (")[0] for row in read(args.out).values() if row.found == "yes"})
    preload()
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        copy = copy_of(args.tree.resolve(), Path(name) / "copy")
        for first in range(0, len(nodes), 25):
            said = Path(name) / f"confirm{first}.txt"
            _, status = os.waitpid(fork(copy, [nodes[first : first + 25]], said, []), 0)
            print(
                f"{min(len(nodes), first + 25)} of {len(nodes)} tests: exit {os.waitstatus_to_exitcode(status)}",
                flush=True,
            )
            if status:
                print(said.with_suffix(".log").read_text()[-3000:])


def sites(args: argparse.Namespace) -> None:
    """Print the faults whose text is nowhere in the tree, without running a test: they need a pair under `also`."""
    gone = [fault for fault in faults() if site(fault, args.tree / "asyncrlhf") is None]
    for fault in gone:
        print(f"{fault.id:26} {fault.file}: {fault.old!r}")
    print(f"{len(gone)} of {len(faults())} faults have no site.")


def compare(args: argparse.Namespace) -> None:
    """Print the faults that one of two measurements found and the other did not."""
    before, after = read(args.before), read(args.after)
    for name in before:
        was, now = before[name].found, after[name].found if name in after else "not measured"
        if was != now:
            print(f"{name:34} {was} -> {now}")
    for path, rows in ((args.before, before), (args.after, after)):
        print(path, dict(Counter(row.found for row in rows.values())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for function in (run, confirm, sites):
        command = commands.add_parser(function.__name__, help=function.__doc__)
        command.set_defaults(function=function)
        if function is not sites:
            command.add_argument("out", type=Path)
        command.add_argument("--tree", type=Path, default=HERE.parents[1], help="package and tests to measure")
        if function is run:
            command.add_argument("--only", default="", help="part of an id, as a regular expression")
            command.add_argument("--jobs", type=int, default=2)
            command.add_argument("--again", action="store_true", help="measure the rows again that OUT.csv holds")
    command = commands.add_parser("compare", help=compare.__doc__)
    command.set_defaults(function=compare)
    command.add_argument("before", type=Path)
    command.add_argument("after", type=Path)
    args = parser.parse_args()
    args.function(args)


if __name__ == "__main__":
    main()
