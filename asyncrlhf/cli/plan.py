"""``asyncrlhf plan``: the best layout for given devices, and an experiment file for ``train``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from asyncrlhf.cli.parser import Parser, law_of
from asyncrlhf.config.compose import check_words, split_config_dir
from asyncrlhf.errors import ConfigError
from asyncrlhf.validation import check, check_folder_name, typed_path


def plan(arguments: Sequence[str]) -> int:
    rest, folder = split_config_dir(arguments)
    parser = plan_parser()
    options, overrides = parser.parse_known_args(rest)
    if options.compare is not None:
        from asyncrlhf.simulator.plan_files import compare

        check(not overrides, f"plan --compare takes a plan and a run, and no {' '.join(overrides)}.")
        compare(*options.compare)
        return 0
    check_words(overrides)
    _check(options, parser)
    from asyncrlhf.simulator.plan import choose_layout, task_of, write  # seconds that a wrong word need not cost

    task = task_of(
        overrides,
        folder,
        run=options.run,
        profile=options.profile,
        groups=_groups(options.gpus, options.device) if options.gpus is not None else (),
        per_node=options.per_node,
        cores=options.cores,
        law=law_of(options, options.prompt_length or 0.0),
        keep=options.keep,
        free_batch=bool(options.free),
    )
    write(task, choose_layout(task, options.simulate), options.out, overrides)
    return 0


def _check(options: argparse.Namespace, parser: Parser) -> None:
    """Raise ConfigError for options that do not belong together or are out of range."""
    given = [name for name in ("run", "profile", "gpus") if getattr(options, name) is not None]
    if len(given) != 1:
        parser.error("give one of --from, --profile and --gpus")
    if (options.gpus is None) != (options.device is None):
        parser.error("--gpus and --device belong together, as in --gpus 16 --device H100")
    parser.check_least(options, cores=1, simulate=1, per_node=0, mean_length=1, prompt_length=1, cv=0)
    check_folder_name("plan --out", options.out.name)


def _groups(gpus: str, device: str) -> list[tuple[str, int]]:
    """(name, number) of each group of devices."""
    counts, names = gpus.split(","), device.split(",")
    if len(counts) != len(names) or not all(count.isdigit() and int(count) > 0 for count in counts):
        raise ConfigError(
            f"plan: --gpus {gpus} --device {device} do not describe groups; write one number >= 1 per name, such as "
            "--gpus 8,16 --device H100,L4."
        )
    return [(name, int(count)) for name, count in zip(names, counts, strict=True)]


def plan_parser() -> Parser:
    """Options of the command; all other words are overrides."""
    parser = Parser("plan", "The best layout for devices, simulated before it is run.")
    parser.add_argument(
        "--from", dest="run", type=typed_path, metavar="RUN", help="plan for this machine with the costs of a run"
    )
    parser.add_argument("--profile", type=typed_path, help="plan for this machine, costs of `asyncrlhf profile`")
    parser.add_argument("--cores", type=int, default=os.cpu_count(), help="cores of this machine that the plan may use")
    parser.add_argument("--gpus", help="number of catalogue devices, such as 16; for several groups: 8,16")
    parser.add_argument("--device", help="their name, such as H100; for several groups: H100,L4")
    parser.add_argument("--per-node", type=int, default=0, help="devices per node (default: the catalogue's)")
    parser.add_argument("--prompt-length", type=float, default=None, help="mean tokens per prompt")
    parser.add_lengths()
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
    parser.add_argument(
        "--compare", nargs=2, type=typed_path, metavar=("PLAN", "RUN"), help="compare predicted with measured figures"
    )
    return parser
