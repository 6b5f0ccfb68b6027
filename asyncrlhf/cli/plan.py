"""``asyncrlhf plan``: the best layout for given devices, and an experiment file for ``train``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from asyncrlhf.cli.parser import Parser
from asyncrlhf.config.compose import check_words, split_config_dir
from asyncrlhf.simulator.plan import choose_layout, task_of, write
from asyncrlhf.validation import check, typed_path

OTHER_SYSTEMS = {"--what-if": "what_if", "--compare-templates": "compare_templates"}  # with their own options


def plan(arguments: Sequence[str]) -> int:
    rest, folder = split_config_dir(arguments)
    for word, verb in OTHER_SYSTEMS.items():
        if word in rest:
            from asyncrlhf.cli import whatif

            return getattr(whatif, verb)([other for other in rest if other != word])  # type: ignore[no-any-return]
    parser = plan_parser()
    options, overrides = parser.parse_known_args(rest)
    if options.compare is not None:
        from asyncrlhf.simulator.plan_files import compare

        check(not overrides, f"plan --compare takes a plan and a run, and no {' '.join(overrides)}.")
        compare(*options.compare)
        return 0
    check_words(overrides)
    _check(options, parser)
    task = task_of(options, overrides, folder)
    write(task, choose_layout(task, options.simulate), options.out, overrides)
    return 0


def _check(options: argparse.Namespace, parser: Parser) -> None:
    """Raise ConfigError for options that do not belong together or are out of range."""
    given = [name for name in ("run", "profile", "gpus") if getattr(options, name) is not None]
    if len(given) != 1:
        parser.error("give one of --from, --profile and --gpus")
    if (options.gpus is None) != (options.device is None):
        parser.error("--gpus and --device belong together, as in --gpus 16 --device H100")
    for name, least in (
        ("cores", 1),
        ("simulate", 1),
        ("per_node", 0),
        ("mean_length", 1.0),
        ("prompt_length", 1.0),
        ("cv", 0.0),
    ):
        value = getattr(options, name)
        if value is not None and not value >= least:
            parser.error(f"--{name.replace('_', '-')} {value:g} is too small; at least {least:g}")


def plan_parser() -> Parser:
    """Options of the command; all other words are overrides."""
    parser = Parser(prog="asyncrlhf plan", description="The best layout for devices, simulated before it is run.")
    parser.add_argument(
        "--from", dest="run", type=typed_path, metavar="RUN", help="plan for this machine with the costs of a run"
    )
    parser.add_argument("--profile", type=typed_path, help="plan for this machine, costs of `asyncrlhf profile`")
    parser.add_argument("--cores", type=int, default=os.cpu_count(), help="cores of this machine that the plan may use")
    parser.add_argument("--gpus", help="number of catalogue devices, such as 16; for several groups: 8,16")
    parser.add_argument("--device", help="their name, such as H100; for several groups: H100,L4")
    parser.add_argument("--per-node", type=int, default=0, help="devices per node (default: the catalogue's)")
    parser.add_argument("--prompt-length", type=float, default=None, help="mean tokens per prompt")
    parser.add_argument("--mean-length", type=float, default=None, help="mean tokens per response, log-normal")
    parser.add_argument("--cv", type=float, default=0.5, help="coefficient of variation of the response lengths")
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        help="condition on a decision, [WHY=]NAME<=VALUE, such as max_staleness<=2",
    )
    parser.add_argument(
        "--free", action="append", default=[], choices=["batch_size"], help="further setting that the plan may change"
    )
    parser.add_argument("--simulate", type=int, default=32, help="number of layouts to simulate")
    parser.add_argument("--out", type=typed_path, default=Path("plans/plan"), help="FOLDER/NAME of files (plans/plan)")
    parser.add_argument("--compare-templates", action="store_true", help="compare common templates on equal devices")
    parser.add_argument("--what-if", action="store_true", help="plan like other systems; train cannot run these plans")
    parser.add_argument(
        "--compare", nargs=2, type=typed_path, metavar=("PLAN", "RUN"), help="compare predicted with measured figures"
    )
    return parser
