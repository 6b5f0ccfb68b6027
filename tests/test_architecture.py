"""The rules of the house as tests: layers, docstrings, lengths, broad excepts, light imports, known keys in conf/."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "asyncrlhf"
CONF = ROOT / "conf"

# A module or folder of the package, and the layer it stands on; imports point to the same layer or a lower one.
LAYERS = {
    "types": 0, "errors": 0, "validation": 0, "plugins": 0, "redaction": 0, "turns": 0, "garbage": 0, "scratch": 0,
    "last_words": 0, "shortages": 0,
    "algorithms": 1,
    "data": 2, "models": 2, "rewards": 2, "tasks": 2,
    "engines": 3, "episodes": 3, "learner": 3,
    "transport": 4,
    "buffer": 5,
    "config": 6, "readahead": 6,
    "actors": 7, "records": 7,
    "cluster": 8,
    "orchestrator": 9,
    "stages": 10, "sweeps": 10,
    "cli": 11, "report": 11, "bench": 11, "simulator": 11, "doctor": 11, "__main__": 11, "__init__": 0,
    "api": 12,
}  # fmt: skip
PLANNER = "planner"  # beside the layers: imports `types` only
MAX_ROOM_FILES = 20  # directly in one folder, without its __init__; a fuller one gets inner rooms by subject
MAX_FILE_LINES = 500
LONGER: dict[str, str] = {}  # file -> why its one subject needs more
MAX_FUNCTION_LINES = 60
HEAVY = ("ray", "vllm", "deepspeed", "wandb")
NOT_IN_ALGORITHMS = ("ray", "hydra", "omegaconf", "os", "io", "pathlib", "json", "pickle", "subprocess", "socket")

# File -> (how many broad excepts, why there). A broad except is right only where one rollout, thread or process ends;
# one that ends in a bare `raise` hides nothing and needs no entry.
BROAD_EXCEPTS: dict[str, tuple[int, str]] = {
    "asyncrlhf/actors/generator.py": (1, "a command's error goes to its caller through the future"),
    "asyncrlhf/episodes/agents/harness.py": (1, "a user's agent may raise anything; it fails one episode"),
    "asyncrlhf/episodes/adapters/mcp_tools.py": (
        1,
        "the client of another program may raise anything; who waits gets it",
    ),
    "asyncrlhf/cli/main.py": (1, "whatever ends a command is one sentence, and its trace is kept"),
    "asyncrlhf/cli/multirun.py": (1, "a job of a multirun ends alone, with its sentence and exit code"),
    "asyncrlhf/orchestrator/run.py": (3, "a failing close or summary keeps no other from its end, and hides no cause"),
    "asyncrlhf/transport/collective/chain.py": (2, "the error of a thread that receives or sends goes to who waits"),
    "asyncrlhf/transport/collective/group.py": (1, "the error of the thread that forms a group goes to its caller"),
    "asyncrlhf/transport/vllm_workers.py": (2, "a worker's error goes to its replica as an answer"),
    "asyncrlhf/records/show/sinks.py": (1, "a sink is other people's code; a run does not end for it"),
    "asyncrlhf/records/show/callbacks.py": (1, "a user's callback may raise anything; the run ends with its name"),
    "asyncrlhf/plugins.py": (1, "the user's own code may raise anything; it becomes a ConfigError"),
    "asyncrlhf/sweeps/worker.py": (1, "whatever ends one job of a sweep stops no other"),
    "asyncrlhf/rewards/model_thread.py": (1, "a call's error goes to its caller"),
    "asyncrlhf/episodes/driver.py": (1, "a user's environment may raise anything; it fails one episode"),
    "asyncrlhf/episodes/environment.py": (1, "the error of a call in a thread goes to its caller"),
    "asyncrlhf/episodes/tools.py": (
        2,
        "a user's tool may raise anything, and the model is told; so may its description",
    ),
    "asyncrlhf/rewards/guard.py": (1, "a user's reward function may raise anything; it fails one rollout"),
}


@cache
def modules() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(), str(path)) for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def name_of(path: Path) -> str:
    """`asyncrlhf/buffer/ledger.py` is `asyncrlhf.buffer.ledger`; a package's `__init__` is the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


def part_of(module: str) -> str:
    """The folder or top-level module of the package that `asyncrlhf.a.b` belongs to: `a`."""
    pieces = module.split(".")
    return pieces[1] if len(pieces) > 1 else "__init__"


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute module name) of every import, those inside functions and TYPE_CHECKING blocks too."""
    package = [*path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(modules()[path]):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module == "asyncrlhf":
                yield from ((node.lineno, f"asyncrlhf.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, module


def own_imports(path: Path) -> Iterator[tuple[int, str]]:
    """Imports of parts of this package; names that `asyncrlhf/__init__.py` itself defines are no parts."""
    for line, module in imports_of(path):
        if module.split(".")[0] == "asyncrlhf" and (part_of(module) in LAYERS or part_of(module) == PLANNER):
            yield line, module


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def complain(problems: list[str]) -> None:
    assert not problems, "\n" + "\n".join(problems)


def test_every_part_has_a_layer() -> None:
    unknown = {part_of(name_of(path)) for path in modules()} - set(LAYERS) - {PLANNER}
    assert not unknown, f"give these a layer in LAYERS: {sorted(unknown)}"


def test_imports_point_downward() -> None:
    problems = []
    for path in modules():
        part = part_of(name_of(path))
        if part == PLANNER:
            continue
        for line, module in own_imports(path):
            other = part_of(module)
            if other == PLANNER and LAYERS[part] < LAYERS["cli"]:
                problems.append(f"{where(path, line)}: {part} imports the planner; only layer {LAYERS['cli']} may.")
            elif other != PLANNER and LAYERS[other] > LAYERS[part]:
                problems.append(
                    f"{where(path, line)}: layer {LAYERS[part]} ({part}) imports layer {LAYERS[other]} ({module})."
                )
    complain(problems)


def circles(edges: dict[str, set[str]]) -> list[str]:
    """The circles of a graph in words, one for each place where a walk from above comes back to its own trail."""
    done: set[str] = set()
    found: list[str] = []

    def visit(part: str, trail: tuple[str, ...]) -> None:
        if part in trail:
            found.append(f"import circle: {' -> '.join([*trail[trail.index(part) :], part])}")
        elif part not in done:
            for other in sorted(edges.get(part, set()) - {part}):
                visit(other, (*trail, part))
            done.add(part)

    for part in sorted(edges):
        visit(part, ())
    return found


def edges_between(place: Callable[[str], str]) -> dict[str, set[str]]:
    """Which place imports which, for the ``place`` of each module; a name counts for the module that has it."""
    edges: dict[str, set[str]] = {}
    for path in modules():
        edges.setdefault(place(name_of(path)), set()).update(place(module) for module in files_imported(path))
    return edges


@cache
def files_imported(path: Path) -> tuple[str, ...]:
    """The modules of this package that a file imports, by ``from asyncrlhf.a import b`` too."""
    return tuple(_files_imported(path, set(map(name_of, modules()))))


def _files_imported(path: Path, known: set[str]) -> Iterator[str]:
    for node in ast.walk(modules()[path]):
        assert not getattr(node, "level", 0), f"{where(path, node.lineno)}: imports are absolute, so that doors show."
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("asyncrlhf"):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in known else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)


def room_of(module: str) -> str:
    """The folder of a module, as a dotted name: `asyncrlhf.learner.step` of `asyncrlhf.learner.step.plan`."""
    return module if module in rooms() else module.rpartition(".")[0]


@cache
def rooms() -> dict[str, tuple[str, ...]]:
    """Every folder of the package and the doors that its ``__init__`` names: what others may import of it."""
    found: dict[str, tuple[str, ...]] = {}
    for path, tree in modules().items():
        if path.name == "__init__.py" and path.parent != PACKAGE:
            named = [n for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "DOORS"]
            found[name_of(path)] = tuple(ast.literal_eval(named[0].value)) if named else ()
    return found


def test_no_files_import_each_other_in_a_circle() -> None:
    complain(circles(edges_between(lambda module: module)))


def test_no_rooms_import_each_other_in_a_circle() -> None:
    """The folders of the package; and the inner rooms of each folder, whose own files stand for themselves there."""
    complain(circles(edges_between(part_of)))
    outer = {room.rpartition(".")[0] for room in rooms()}
    complain(circles(edges_between(lambda module: module if room_of(module) in outer else room_of(module))))


def test_rooms_are_entered_by_their_doors() -> None:
    """A door is a module that another room imports: one that is missing is a breach, one too many a door to nowhere."""
    used: dict[str, set[str]] = {room: set() for room in rooms()}
    problems = []
    for path in modules():
        own = name_of(path)
        for module in files_imported(path):
            for room, doors in rooms().items():
                if module.startswith(f"{room}.") and own != room and not own.startswith(f"{room}."):
                    door = module.removeprefix(f"{room}.")
                    used[room].add(door)
                    if door not in doors:
                        problems.append(f"{path.relative_to(ROOT)}: imports {module}, which is no door of {room}.")
    for room, doors in rooms().items():
        extra = sorted(set(doors) - used[room])
        problems += [f"{room}: its DOORS name {door}, which no other room imports." for door in extra]
        if list(doors) != sorted(doors):
            problems.append(f"{room}: its DOORS are not in order.")
    complain(problems)


def test_rooms_hold_one_floor_plan_each() -> None:
    """At most MAX_ROOM_FILES files side by side; an inner room is worth its door only with several files."""
    problems = []
    for room in rooms():
        own = [n for n in map(name_of, modules()) if n.rpartition(".")[0] == room and n not in rooms()]
        if len(own) > MAX_ROOM_FILES:
            problems.append(f"{room}: {len(own)} files side by side; at most {MAX_ROOM_FILES}.")
        if len(own) < 3 and not any(inner.startswith(f"{room}.") for inner in rooms()):
            problems.append(f"{room}: {len(own)} files; a room has at least 3.")
    complain(problems)


def test_engines_and_learner_do_not_know_each_other() -> None:
    complain(
        [
            f"{where(path, line)}: imports {module}."
            for path in modules()
            for line, module in own_imports(path)
            if {part_of(name_of(path)), part_of(module)} == {"engines", "learner"}
        ]
    )


def test_planner_imports_types_only() -> None:
    complain(
        [
            f"{where(path, line)}: the planner imports {module}."
            for path in modules()
            if part_of(name_of(path)) == PLANNER
            for line, module in own_imports(path)
            if part_of(module) not in ("types", PLANNER)
        ]
    )


def test_algorithms_are_pure() -> None:
    problems = []
    for path, tree in modules().items():
        if part_of(name_of(path)) != "algorithms":
            continue
        for line, module in imports_of(path):
            if module.split(".")[0] in NOT_IN_ALGORITHMS or part_of(module) == "config" or module.endswith("_config"):
                problems.append(f"{where(path, line)}: algorithms/ takes tensors and floats; it imports {module}.")
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("open", "print"):
                problems.append(f"{where(path, node.lineno)}: algorithms/ does no I/O; it calls {node.func.id}.")
    complain(problems)


def test_every_module_says_its_job_in_its_first_line() -> None:
    problems = []
    for path, tree in modules().items():
        docstring = ast.get_docstring(tree)
        if not docstring or len(docstring.splitlines()[0]) < 10:
            problems.append(f"{path.relative_to(ROOT)}: opens without a docstring.")
    complain(problems)


def test_files_and_functions_are_short() -> None:
    problems = []
    for path, tree in modules().items():
        lines = len(path.read_text().splitlines())
        if lines > MAX_FILE_LINES and str(path.relative_to(ROOT)) not in LONGER:
            problems.append(f"{path.relative_to(ROOT)}: {lines} lines; at most {MAX_FILE_LINES}.")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    problems.append(
                        f"{where(path, node.lineno)}: {node.name} has {length} lines; at most {MAX_FUNCTION_LINES}."
                    )
    complain(problems)


def broad_excepts(tree: ast.Module) -> Iterator[int]:
    """Lines of the handlers that catch everything and do not raise it again."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            last = node.body[-1]
            if isinstance(last, ast.Raise) and last.exc is None:
                continue
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            if any(c is None or (isinstance(c, ast.Name) and c.id in ("Exception", "BaseException")) for c in caught):
                yield node.lineno


def test_broad_excepts_stand_only_at_boundaries() -> None:
    problems = []
    found = {str(path.relative_to(ROOT)): list(broad_excepts(tree)) for path, tree in modules().items()}
    for file, lines in found.items():
        allowed, _ = BROAD_EXCEPTS.get(file, (0, ""))
        if len(lines) > allowed:
            problems.append(f"{file}: `except Exception` on lines {lines}; {allowed} allowed (see BROAD_EXCEPTS).")
    for file, (allowed, reason) in BROAD_EXCEPTS.items():
        if len(found.get(file, [])) < allowed:
            problems.append(f"BROAD_EXCEPTS allows {allowed} in {file}, which has fewer: lower it ({reason})")
    complain(problems)


REMOTE_FOLDERS = ("actors", "cluster", "orchestrator")
BOUNDING = ("ask", "ask_to_start", "within")  # await the answer of another process for at most so many seconds


def is_remote(node: ast.AST) -> bool:
    """Whether ``node`` calls an actor: ``x.method.remote(...)``. ``ray.remote(...).remote(...)`` makes one."""
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "remote"
    return called and "ray.remote(" not in ast.unparse(node)


def reachable(node: ast.AST) -> Iterator[ast.AST]:
    """``node`` and what is below it, but nothing inside a bounding call or a lambda."""
    named = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BOUNDING
    if not named and not isinstance(node, ast.Lambda):
        yield node
        for child in ast.iter_child_nodes(node):
            yield from reachable(child)


def unbounded_waits(tree: ast.Module) -> Iterator[int]:
    """Lines that wait for an actor's answer, or for the object store, without a limit."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            kept = [a for a in ast.walk(function) if isinstance(a, ast.Assign) and any(map(is_remote, reachable(a)))]
            held = {n.id for a in kept for t in a.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
            for wait in [node for node in ast.walk(function) if isinstance(node, ast.Await)]:
                if any(is_remote(n) or (isinstance(n, ast.Name) and n.id in held) for n in reachable(wait.value)):
                    yield wait.lineno
    for node in ast.walk(tree):
        waits = isinstance(node, ast.Call) and ast.unparse(node.func) in ("ray.get", "ray.wait")
        if waits and all(keyword.arg != "timeout" for keyword in node.keywords):
            yield node.lineno


def test_every_remote_call_has_a_deadline() -> None:
    complain(
        [
            f"{where(path, line)}: waits for another process without a limit; see cluster/handles.py."
            for path, tree in modules().items()
            if part_of(name_of(path)) in REMOTE_FOLDERS
            for line in unbounded_waits(tree)
        ]
    )


IMPORT_ALL = """
import importlib, json, sys
names, heavy = json.loads(sys.argv[1])
loaded = {}
for name in names:
    before = {h for h in heavy if h in sys.modules}
    importlib.import_module(name)
    new = [h for h in heavy if h in sys.modules and h not in before]
    if new:
        loaded[name] = new
print(json.dumps(loaded))
"""


@pytest.mark.more
def test_layers_0_to_5_import_without_the_heavy_packages() -> None:
    """In a process of its own: a learner or an engine can be used and tested without Ray, and starts quickly."""
    names = [name_of(p) for p in modules() if LAYERS.get(part_of(name_of(p)), 9) <= 5 and p != PACKAGE / "__init__.py"]
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, json.dumps([names, HEAVY])],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {}


def unknown_keys(data: Any, schema: type, prefix: str = "") -> Iterator[str]:
    """Dotted keys of ``data`` that the dataclass ``schema`` (nested) does not have."""
    hints = get_type_hints(schema)
    known = {"async" if f.name == "async_" else f.name: hints[f.name] for f in fields(schema)}
    for key, value in (data or {}).items():
        if key not in known:
            yield f"{prefix}{key}"
        elif is_dataclass(known[key]) and isinstance(value, dict):
            yield from unknown_keys(value, known[key], f"{prefix}{key}.")


def config_files() -> list[Path]:
    return [p for p in sorted(CONF.rglob("*.yaml")) if p.relative_to(CONF).parts[0] != "hydra"]


@pytest.mark.parametrize("path", config_files(), ids=lambda p: str(p.relative_to(CONF)))
def test_yaml_holds_only_known_keys(path: Path) -> None:
    from asyncrlhf.config.run_config import RunConfig

    text = path.read_text()
    data = {k: v for k, v in (yaml.safe_load(text) or {}).items() if k not in ("defaults", "hydra")}
    group = path.relative_to(CONF).parts[0]
    if "@package _global_" not in text and path.parent != CONF:
        data = {group: data}
    assert list(unknown_keys(data, RunConfig)) == []
    assert len(text.splitlines()) <= 60, "a file in conf/ holds what differs from the typed defaults, so it is short"


# Methods that change something, by name: what waits calls none of them in its condition.
MUTATORS = frozenset(
    (
        *("abandon", "add", "admit", "append", "begin", "cancel", "clear", "create_task", "discard", "drop"),
        *("end", "evict_stale", "extend", "fail", "insert", "notify", "pop", "popleft", "progressed", "purge"),
        *("put", "put_nowait", "release", "remove", "requeue", "reserve", "set_result", "start", "take"),
        *("touch", "update"),
    )
)
# Calls that wait for a disk. The run's own classes and methods that do are named too.
FILE_CALLS = frozenset(
    (
        *("open", "read_text", "write_text", "read_bytes", "write_bytes", "mkdir", "unlink", "rmtree", "fsync"),
        *("write_table", "CheckpointWriter", "commit", "log_step", "sync_metrics"),
    )
)


def called_name(call: ast.Call) -> str:
    """`f` of `f(...)` and of `x.y.f(...)`."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def own_calls(node: ast.AST) -> Iterator[str]:
    """Names that `node` calls on `self` or in its module; what `off_loop` is given runs elsewhere."""
    for call in calls_of(node):
        on_self = isinstance(call.func, ast.Attribute) and getattr(call.func.value, "id", "") == "self"
        if on_self or isinstance(call.func, ast.Name):
            yield called_name(call)


def calls_of(node: ast.AST) -> Iterator[ast.Call]:
    if isinstance(node, ast.Call):
        yield node
        if called_name(node) == "off_loop":
            return
    for child in ast.iter_child_nodes(node):
        yield from calls_of(child)


def reached(tree: ast.Module, start: ast.AST) -> list[ast.AST]:
    """`start` and the functions of the module that it calls, directly or through others."""
    functions = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    found = [start]
    for node in found:
        found += [f for name in own_calls(node) if (f := functions.get(name)) is not None and f not in found]
    return found


def impure_waits(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, what it does) of each condition given to a signal's `wait_for` that does more than look."""
    functions = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call) and called_name(n) == "wait_for"):
        if getattr(getattr(call.func, "value", None), "id", "") == "asyncio":
            continue
        given = call.args[0]
        condition = functions.get(getattr(given, "attr", getattr(given, "id", "")), given)
        for part in reached(tree, condition):
            for node in ast.walk(part):
                targets = getattr(node, "targets", [getattr(node, "target", None)])
                if isinstance(node, ast.Nonlocal | ast.Global | ast.Delete):
                    yield call.lineno, type(node).__name__.lower()
                elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and any(
                    isinstance(t, ast.Attribute | ast.Subscript) for t in targets
                ):
                    yield call.lineno, f"assigns on line {node.lineno}"
                elif isinstance(node, ast.Call) and called_name(node) in MUTATORS:
                    yield call.lineno, f"calls {called_name(node)}"


def file_calls_on_the_loop(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of calls that wait for a disk, in coroutines and in what they call in their module."""
    for start in (n for n in ast.walk(tree) if isinstance(n, ast.AsyncFunctionDef)):
        for part in reached(tree, start):
            yield from ((c.lineno, called_name(c)) for c in calls_of(part) if called_name(c) in FILE_CALLS)


def of_orchestrator() -> Iterator[tuple[Path, ast.Module]]:
    return ((path, tree) for path, tree in modules().items() if part_of(name_of(path)) == "orchestrator")


def test_conditions_that_loops_wait_for_only_look() -> None:
    problems = [(path, line, what) for path, tree in of_orchestrator() for line, what in impure_waits(tree)]
    complain([f"{where(path, line)}: the condition {what}; act after the wait." for path, line, what in problems])


def test_no_file_is_written_or_read_on_the_event_loop() -> None:
    problems = {(path, line, name) for path, tree in of_orchestrator() for line, name in file_calls_on_the_loop(tree)}
    complain([f"{where(path, line)}: {name} runs on the event loop; use off_loop." for path, line, name in problems])


def test_the_checker_itself_sees_what_it_should() -> None:
    """The rules above are worth something only if a breach is found."""
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["import circle: b -> c -> b"]
    assert circles({"a": {"b", "c"}, "b": {"c"}}) == []
    assert {room_of("asyncrlhf.learner.step.plan"), room_of("asyncrlhf.learner.step")} == {"asyncrlhf.learner.step"}
    waits = "class A:\n async def f(self): await self.s.wait_for(self._look)\n def _look(self): return self._more()\n"
    assert list(impure_waits(ast.parse(waits + " def _more(self): return self.buffer.take(1)")))
    assert list(impure_waits(ast.parse(waits + " def _more(self): self.seen = 1")))
    assert not list(impure_waits(ast.parse(waits + " def _more(self): return self.buffer.ready(1)")))
    file = "class A:\n async def f(self): self._g()\n def _g(self): self.path.write_text('')\n"
    assert list(file_calls_on_the_loop(ast.parse(file))) == [(3, "write_text")]
    assert not list(file_calls_on_the_loop(ast.parse("async def f(): await off_loop(lambda: open('a'))")))
    tree = ast.parse("try:\n    pass\nexcept (ValueError, Exception):\n    pass\n")
    assert list(broad_excepts(tree)) == [3]
    assert list(broad_excepts(ast.parse("try:\n    pass\nexcept BaseException:\n    raise\n"))) == []

    body = [
        "made = ray.remote(Actor).options(num_cpus=1).remote(spec)",
        "await self.actor.load.remote(3)",
        "await asyncio.gather(*(rank.load.remote(3) for rank in ranks))",
        "await ask(name, self.actor.load.remote(3), 5.0, 'load')",
        "facts, *chunks = self.actor.collect.remote()",
        "await asyncio.wait_for(chunks[0], 5.0)",
        "await ask(name, facts, 5.0, 'collect')",
        "await made.ready()",
        "ray.get(facts)",
        "ray.get(facts, timeout=5.0)",
    ]
    waits = ast.parse("async def main():\n" + "".join(f"    {line}\n" for line in body))
    assert [body[line - 2] for line in unbounded_waits(waits)] == [body[1], body[2], body[5], body[8]]

    from asyncrlhf.config.run_config import RunConfig

    bad = {"learner": {"learning_rat": 1.0, "ranks": 1}, "async": {"mode": "sync", "eta": 1}, "sed": 0}
    assert list(unknown_keys(bad, RunConfig)) == ["learner.learning_rat", "async.eta", "sed"]
