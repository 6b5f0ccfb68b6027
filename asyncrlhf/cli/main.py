"""The ``asyncrlhf`` command: picks the subcommand, and turns errors into one sentence and an exit code."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Sequence

from asyncrlhf import __version__
from asyncrlhf.errors import AsyncRLHFError

USAGE = """asyncrlhf: asynchronous off-policy RLHF

  asyncrlhf train [overrides]      one run, such as: asyncrlhf train steps=50 async.max_staleness=4
                                   with -m a sweep:  asyncrlhf train -m seed=0,1,2 async.mode=sync,async
                                   --cfg job shows the config, --help all its keys
  asyncrlhf sweep [overrides]      a grid with seeds and one report: asyncrlhf sweep experiment=staleness_quick
  asyncrlhf sft [overrides]        fine-tunes model.path on sft.path
  asyncrlhf preferences [...]      pairs of model.path's answers, labelled by reward.*
  asyncrlhf reward-model [...]     a reward model from the preferences in reward_model.path
  asyncrlhf evaluate [overrides]   held-out reward, win rate and KL of a model: asyncrlhf evaluate model.path=FOLDER
                                   of a run's newest checkpoint: asyncrlhf evaluate run=RUN
  asyncrlhf report RUN...          draw the curves of one run or several
  asyncrlhf bench NAME             control_plane, fusion, generation, overlap, replicas, straggler, trl, weights
  asyncrlhf doctor [overrides]     what this machine offers, and what would fail of such a run

Exit codes: 0 done, 1 a run that failed, 2 wrong config or input, 130 interrupted."""


def _train(arguments: Sequence[str]) -> int:
    from asyncrlhf.cli.train import main

    return main(arguments)


def _sweep(arguments: Sequence[str]) -> int:
    from asyncrlhf.cli.sweep import main

    return main(arguments)


def _sft(arguments: Sequence[str]) -> int:
    from asyncrlhf.cli.stages import sft

    return sft(arguments)


def _preferences(arguments: Sequence[str]) -> int:
    from asyncrlhf.cli.stages import preferences

    return preferences(arguments)


def _reward_model(arguments: Sequence[str]) -> int:
    from asyncrlhf.cli.stages import reward_model

    return reward_model(arguments)


def _evaluate(arguments: Sequence[str]) -> int:
    from asyncrlhf.cli.evaluate import main

    return main(arguments)


def _report(arguments: Sequence[str]) -> int:
    from asyncrlhf.cli.report import main

    return main(arguments)


def _bench(arguments: Sequence[str]) -> int:
    from asyncrlhf.bench.run import main

    return main(arguments)


def _doctor(arguments: Sequence[str]) -> int:
    from asyncrlhf.cli.doctor import run

    return run(arguments)


# Imports wait for the choice: `asyncrlhf doctor` must answer where torch does not even import.
COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": _train,
    "sweep": _sweep,
    "sft": _sft,
    "preferences": _preferences,
    "reward-model": _reward_model,
    "evaluate": _evaluate,
    "report": _report,
    "bench": _bench,
    "doctor": _doctor,
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(__version__)
        return 0
    command = COMMANDS.get(arguments[0])
    if command is None:
        close = difflib.get_close_matches(arguments[0], COMMANDS, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        print(f"asyncrlhf: {arguments[0]} is no command{hint}; allowed: {', '.join(COMMANDS)}.", file=sys.stderr)
        return 2
    try:
        return command(arguments[1:])
    except AsyncRLHFError as error:
        # Messages of other libraries, quoted in ours, may have several lines.
        print(f"asyncrlhf: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except SystemExit as end:  # argparse and Hydra answer --help so
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        print("asyncrlhf: interrupted.", file=sys.stderr)
        return 130
