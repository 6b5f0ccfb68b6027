"""``asyncrlhf plan --what-if`` and ``--compare-templates``: plans of published systems, and common templates on
equal devices."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from asyncrlhf.errors import ConfigError
from asyncrlhf.planner.shapes import catalogue
from asyncrlhf.simulator.other_systems import (
    common_templates,
    published_plans,
)
from asyncrlhf.simulator.templates import MODELS
from asyncrlhf.validation import typed_path


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print one sentence about the error instead of a usage text."""
        raise ConfigError(f"{self.prog.removeprefix('asyncrlhf ')}: {message}.")


def _parser(prog: str, about: str) -> _Parser:
    parser = _Parser(prog=prog, description=about)
    parser.add_argument("--device", default="H100", help=f"device of the catalogue: {', '.join(catalogue())}")
    parser.add_argument("--model", default="llama-3-8b", help=f"{', '.join(MODELS)}, or a folder with a config.json")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def _positive(parser: _Parser, options: argparse.Namespace, *names: str) -> None:
    for name in names:
        given = getattr(options, name)
        if given is not None and not given >= 1:
            parser.error(f"--{name.replace('_', '-')} {given:g} is too small; at least 1")


def what_if_parser() -> _Parser:
    parser = _parser("asyncrlhf plan --what-if", "Plans of ReaL, HybridFlow and Pipe-RLHF, for comparison.")
    parser.add_argument("--devices", type=int, default=16)
    parser.add_argument("--response", type=int, default=512, help="tokens of a response")
    parser.add_argument("--batch", type=int, default=256, help="prompts per iteration")
    parser.add_argument("--steps", type=int, default=300, help="steps of the search at each temperature")
    return parser


def what_if(arguments: Sequence[str]) -> int:
    parser = what_if_parser()
    options = parser.parse_args(list(arguments))
    _positive(parser, options, "devices", "response", "batch", "prompt", "steps")
    published_plans(options)
    return 0


def templates_parser() -> _Parser:
    parser = _parser("asyncrlhf plan --compare-templates", "Compares common templates on equal devices.")
    parser.add_argument("--devices", default="8", help="numbers of devices, separated by commas")
    parser.add_argument("--response", type=float, default=1024, help="mean tokens of a response, log-normal")
    parser.add_argument("--cv", type=float, default=0.6, help="coefficient of variation of these lengths")
    parser.add_argument("--longest", type=int, default=4096, help="longest response in tokens")
    parser.add_argument(
        "--batch", type=int, default=None, help="rollouts per step (default: 32 per device, at most 16,384)"
    )
    parser.add_argument("--steps", type=int, default=8, help="steps to simulate, and 2 more for each version of lag")
    parser.add_argument("--out", type=typed_path, default=None, help="CSV file to write")
    return parser


def compare_templates(arguments: Sequence[str]) -> int:
    parser = templates_parser()
    options = parser.parse_args(list(arguments))
    _positive(parser, options, "prompt", "response", "longest", "batch", "steps")
    if not options.cv >= 0:
        parser.error(f"--cv {options.cv:g} is too small; at least 0")
    common_templates(options)
    return 0
