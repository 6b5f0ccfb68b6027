"""``asyncrlhf bench NAME``: every name leads to a module with a ``run``; the experiments' own need the repository."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from asyncrlhf.bench import run
from asyncrlhf.cli.main import USAGE
from asyncrlhf.errors import ConfigError


@pytest.mark.parametrize("name", run.BENCHMARKS)
def test_every_name_leads_to_a_run(name: str) -> None:
    file = run.REPOSITORY / Path(*run.BENCHMARKS[name].split(".")).with_suffix(".py")
    names = {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}
    assert "run" in names


def test_a_benchmark_of_the_repository_says_so_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "REPOSITORY", tmp_path)
    with pytest.raises(ConfigError, match=r"trl is part of .* the repository: checkpoint\."):
        run.main(["trl"])


def test_arguments_reach_the_benchmark_of_an_experiment() -> None:
    with pytest.raises(ConfigError, match="--receivers=0 is out of range"):
        run.main(["weights", "--receivers", "0"])


def test_a_misspelt_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"wights is not a benchmark \(did you mean weights\?\)"):
        run.main(["wights"])


def test_the_usage_names_every_benchmark() -> None:
    lines = USAGE.splitlines()
    (start,) = (at for at, line in enumerate(lines) if "asyncrlhf bench" in line)
    named = " ".join(lines[start : start + 2]).removeprefix("  asyncrlhf bench NAME").replace(",", " ").split()
    assert named == sorted(run.BENCHMARKS)
