"""Runs the numeric tests once for each way in which a CPU may compute, with `--margins`: `make test-numeric`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("tests/unit", "tests/contract", "tests/references")
# What a setting adds to an environment that has none of these names. torch lists the instruction sets in this order.
SETTINGS = {
    "default": {"ATEN_CPU_CAPABILITY": "default"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "native": {},
    "onednn-avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    # tests/conftest.py would set the first to 1. Threads that spin while they wait take the cores from each other.
    "threads": {"OMP_NUM_THREADS": "2", "TEST_THREADS": "2", "OMP_WAIT_POLICY": "passive"},
}
NEED_AVX2 = ("avx2", "onednn-avx2")
NAMES = {name for setting in SETTINGS.values() for name in setting}


def native() -> str:
    """The widest instruction set that torch finds on this CPU, such as DEFAULT, AVX2 or AVX512."""
    import torch

    return torch.backends.cpu.get_cpu_capability()


def plain_files() -> list[str]:
    """Options that leave out the files that start Ray, the tests that start vLLM, and long runs."""
    tests = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("test_*.py")))
    return [
        "-m",
        "not vllm and not thorough",
        *(f"--ignore={path}" for path in tests if "ray_local" in path.read_text()),
    ]


def run(name: str, arguments: list[str]) -> int:
    shown = " ".join(f"{key}={value}" for key, value in SETTINGS[name].items() if key != "TEST_THREADS")
    print(f"=== {name}: {shown or 'nothing set'} ===", flush=True)
    command = [sys.executable, "-m", "pytest", *FOLDERS, "--margins", *plain_files(), *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | SETTINGS[name]).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("settings", help=f"some of {', '.join(SETTINGS)}, with blanks between; empty: all")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="for pytest")
    chosen = parser.parse_args()
    names = chosen.settings.split() or list(SETTINGS)
    if unknown := sorted(set(names) - set(SETTINGS)):
        parser.error(f"unknown settings {', '.join(unknown)}; there are {', '.join(SETTINGS)}")
    for name in NAMES:
        os.environ.pop(name, None)
    widest = native()
    outcome = {}
    for name in names:
        if name in NEED_AVX2 and not widest.startswith("AVX"):
            outcome[name] = f"skipped: this CPU has no AVX2 (torch finds {widest})"
        else:
            status = run(name, chosen.arguments)
            outcome[name] = "passed" if status == 0 else f"FAILED (pytest ended with {status})"
    print(f"=== test-numeric on a CPU that torch calls {widest} ===")
    for name, text in outcome.items():
        print(f"{name}: {text}")
    return int(any(text.startswith("FAILED") for text in outcome.values()))


if __name__ == "__main__":
    sys.exit(main())
