"""The wheel is whole: built and installed elsewhere, it runs without this checkout and without a network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")
# -S: site-packages are on the path by PYTHONPATH only, so that an editable installation's .pth adds no checkout.
PYTHON = (sys.executable, "-S")


def run(words: Sequence[str], folder: Path, path: Sequence[str] = ()) -> str:
    """The command's output; its working directory is ``folder``, its PYTHONPATH ``path`` and nothing else."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PIP_NO_INDEX": "1"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run([*PIP, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)], folder)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def path(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What is importable: the installed wheel, then the libraries that it needs."""
    target = tmp_path_factory.mktemp("installed")
    run([*PIP, "install", "--quiet", "--no-deps", "--no-compile", "--target", str(target), str(wheel)], target)
    return [str(target), *dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))]


def files(folder: Path) -> set[str]:
    found = (file for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    return {str(file.relative_to(folder)) for file in found}


def test_the_wheel_has_every_file_of_the_package_and_every_preset(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name.removeprefix("asyncrlhf/") for name in archive.namelist() if name.startswith("asyncrlhf/")}
    assert held == files(ROOT / "asyncrlhf") | {f"conf/{name}" for name in files(ROOT / "conf")}


def test_help_and_a_composed_config_come_from_the_wheel(path: list[str], tmp_path: Path) -> None:
    found = run([*PYTHON, "-c", "import asyncrlhf, sys; print(asyncrlhf.__file__, *sys.path)"], tmp_path, path)
    assert found.startswith(path[0]) and str(ROOT) not in found.split()
    assert "train" in run([*PYTHON, "-m", "asyncrlhf", "--help"], tmp_path, path)
    shown = run([*PYTHON, "-m", "asyncrlhf", "train", "--cfg", "job", "algorithm=vcpo"], tmp_path, path)
    assert "lr: sqrt_ess" in shown


@pytest.mark.more
def test_a_run_trains_and_reports_from_the_wheel(path: list[str], tmp_path: Path) -> None:
    settings = "runtime=local async.mode=sync steps=2 batch_size=16 task.heldout_size=4 logging.wandb=disabled"
    run([*PYTHON, "-m", "asyncrlhf", "train", *settings.split(), "run_dir=run"], tmp_path, path)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["ledger"]["trained"] >= 32
    assert (tmp_path / "run" / "report" / "index.html").stat().st_size > 100_000
