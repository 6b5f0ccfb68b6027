"""``asyncrlhf bench NAME``: picks the benchmark; each alternates what it compares within one call."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from asyncrlhf.errors import ConfigError
from asyncrlhf.validation import check, did_you_mean

# The module of each, whose function ``run`` takes the arguments. Those of experiments/ need the repository.
BENCHMARKS = {
    "checkpoint": "asyncrlhf.bench.checkpoint",
    "control_plane": "experiments.22_control_plane.bench",
    "fusion": "experiments.19_fusion.bench",
    "generation": "experiments.17_generation.bench",
    "overlap": "experiments.12_overlap.bench",
    "pacing": "experiments.23_pacing.bench",
    "replicas": "experiments.18_slow_replica.bench",
    "soak": "experiments.29_soak.bench",
    "straggler": "experiments.15_stragglers.bench",
    "templates": "experiments.08_templates.bench",
    "trl": "experiments.13_against_trl.bench",
    "weights": "experiments.14_weight_publish.bench",
}
REPOSITORY = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark that the first argument names, or list the benchmarks. Raises ConfigError for an unknown name,
    and for an experiment's benchmark if the package is installed without its repository.
    """
    name = arguments[0] if arguments else ""
    asked = {"-h", "--help"} & set(arguments)
    if asked and (len(arguments) == 1 or name in BENCHMARKS):
        print(_about_all() if len(arguments) == 1 else _about(name))
        return 0
    if name not in BENCHMARKS:
        hint = did_you_mean(name, BENCHMARKS)
        raise ConfigError(f"{name or 'nothing'} is not a benchmark{hint}; allowed: {', '.join(BENCHMARKS)}.")
    module = BENCHMARKS[name]
    if module.startswith("experiments."):
        check(
            _file(name).is_file(),
            f"The benchmark {name} is part of the repository's experiments, and this installation has the package "
            "alone; allowed without the repository: "
            f"{', '.join(n for n, m in BENCHMARKS.items() if not m.startswith('experiments.'))}.",
        )
        if str(REPOSITORY) not in sys.path:  # Ray's workers get the path of the process that starts Ray
            sys.path.insert(0, str(REPOSITORY))
    importlib.import_module(module).run(arguments[1:])
    return 0


def _file(name: str) -> Path:
    return REPOSITORY / Path(*BENCHMARKS[name].split(".")).with_suffix(".py")


def _about_all() -> str:
    """Read from the files: importing a benchmark takes seconds."""
    lines = ["asyncrlhf bench NAME [options] [overrides]: what it compares alternates within one call", ""]
    for name in BENCHMARKS:
        about = (
            ast.get_docstring(ast.parse(_file(name).read_text())) if _file(name).is_file() else "(in the repository)"
        )
        lines.append(f"  {name:14} {(about or '').splitlines()[0]}")
    return "\n".join([*lines, "", "asyncrlhf bench NAME --help shows a benchmark's own options; minutes each."])


def _about(name: str) -> str:
    check(
        _file(name).is_file(), f"The benchmark {name} is part of the repository's experiments; nothing is known of it."
    )
    tree = ast.parse(_file(name).read_text())
    runs = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "run"]
    texts = [f"asyncrlhf bench {name}: {ast.get_docstring(tree)}", *(ast.get_docstring(run) or "" for run in runs)]
    options = []
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in (node for node in calls if getattr(node.func, "attr", "") == "add_argument"):
        constants = {k.arg: k.value.value for k in call.keywords if isinstance(k.value, ast.Constant)}
        told = {name: str(value) for name, value in constants.items() if value is not None}
        default = f" (default {told['default']})" if "default" in told else ""
        options.append(f"  {ast.unparse(call.args[0]).strip(chr(39)):20} {told.get('help', '')}{default}".rstrip())
    return "\n\n".join([*(text for text in texts if text), "\n".join(options)])
