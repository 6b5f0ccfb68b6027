"""Shares of a checkpoint's weights whose bfloat16 values full AdamW steps of one learning rate leave unchanged."""

from __future__ import annotations

import argparse
from pathlib import Path

from safetensors import safe_open

STEPS = (1, 2, 5, 10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    options = parser.parse_args()
    hidden, count = dict.fromkeys(STEPS, 0), 0
    for path in sorted(options.folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (safetensors has no iterator)
                before = file.get_tensor(name).bfloat16()
                count += before.numel()
                for steps in STEPS:
                    after = (before.float() + steps * options.learning_rate).bfloat16()
                    hidden[steps] += int((after == before).sum())
    for steps in STEPS:
        print(f"{steps:3d} steps of {options.learning_rate:g}: {hidden[steps] / count:.2f} of {count:,} unchanged")


if __name__ == "__main__":
    main()
