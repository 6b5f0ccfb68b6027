"""The ``asyncrlhf`` command: picks the subcommand, and turns errors into one sentence and an exit code."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from asyncrlhf import __version__
from asyncrlhf.cli.parser import Parser
from asyncrlhf.errors import AsyncRLHFError, shortage
from asyncrlhf.garbage import rare_collections
from asyncrlhf.last_words import by_signal, none_seen
from asyncrlhf.redaction import redact
from asyncrlhf.validation import did_you_mean, typed_path

TRACES = 4  # of errors outside a run, in the temporary folder
USAGE = """asyncrlhf: asynchronous off-policy RLHF

  asyncrlhf train [overrides]      one run, such as: asyncrlhf train steps=50 async.max_staleness=4
                                   with -m a sweep:  asyncrlhf train -m seed=0,1,2 async.mode=sync,async
                                   --cfg job shows the config, --help all settings, --help async one group
  asyncrlhf sweep [overrides]      a grid with seeds and one report: asyncrlhf sweep experiment=staleness_quick
  asyncrlhf sft [overrides]        fine-tunes model.path on sft.path
  asyncrlhf preferences [...]      pairs of model.path's answers, labelled by reward.*
  asyncrlhf reward-model [...]     a reward model from the preferences in reward_model.path
  asyncrlhf evaluate [overrides]   held-out reward, win rate and KL of a model: asyncrlhf evaluate model.path=FOLDER
                                   of a run's newest checkpoint: asyncrlhf evaluate run=RUN
  asyncrlhf watch [RUN]            a live dashboard of a run or a sweep on the terminal
  asyncrlhf status RUN             what each part of a live run waits for, also in one that hangs
  asyncrlhf report RUN...          draw the curves of one run or several
  asyncrlhf verify RUN...          check the guarantees of runs against their records
  asyncrlhf schema [GROUP]         JSON schema of config files, for editors
  asyncrlhf plan --from RUN        the best layout for this machine, or for --gpus 16 --device H100, as an experiment
  asyncrlhf simulate --from RUN    predict a run changed by the overrides, on the virtual clock
  asyncrlhf profile [overrides]    measure the costs of this machine and model; --from RUN: from a run's records
  asyncrlhf bench NAME             checkpoint, control_plane, fusion, generation, overlap, pacing, replicas, soak,
                                   straggler, templates, trl, weights
  asyncrlhf doctor [overrides]     check whether this machine can run `train` with these overrides

Exit codes: 0 done, 1 a run failed, 2 wrong config or input, 130 interrupted, 128 + N ended by signal N."""


def _report(arguments: Sequence[str]) -> int:
    parser = Parser("report", "Draws the curves of one run or several.")
    parser.add_argument("runs", nargs="+", type=typed_path, help="run directories")
    parser.add_argument("--out", type=typed_path, default=None, help="folder of the report (several runs: ./report)")
    options = parser.parse_args(list(arguments))

    from asyncrlhf.report.html import build_report  # plotly: a second that a wrong word need not cost

    print(f"Report: {build_report(options.runs, options.out)}")
    return 0


# Module and function of each. Imports wait for the choice: `asyncrlhf doctor` must answer where torch does not import.
COMMANDS = {
    "train": ("asyncrlhf.cli.train", "main"),
    "sweep": ("asyncrlhf.cli.sweep", "main"),
    "sft": ("asyncrlhf.cli.stages", "sft"),
    "preferences": ("asyncrlhf.cli.stages", "preferences"),
    "reward-model": ("asyncrlhf.cli.stages", "reward_model"),
    "evaluate": ("asyncrlhf.cli.stages", "evaluate"),
    "watch": ("asyncrlhf.cli.watch", "main"),
    "status": ("asyncrlhf.cli.status", "main"),
    "report": ("asyncrlhf.cli.main", "_report"),
    "verify": ("asyncrlhf.cli.verify", "main"),
    "schema": ("asyncrlhf.cli.reference", "schema"),
    "plan": ("asyncrlhf.cli.plan", "plan"),
    "simulate": ("asyncrlhf.cli.simulate", "simulate"),
    "profile": ("asyncrlhf.cli.profile", "profile"),
    "bench": ("asyncrlhf.bench.run", "main"),
    "doctor": ("asyncrlhf.cli.doctor", "run"),
}


BELOW = ("train", "sweep", "sft", "preferences", "reward-model", "evaluate")  # run in a process below this one


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        sys.stdout = Unbreakable(sys.stdout)  # type: ignore[assignment]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(__version__)
        return 0
    if arguments[0] not in COMMANDS:
        hint = did_you_mean(arguments[0], COMMANDS)
        word = printable(arguments[0])
        print(f"asyncrlhf: {word} is not a command{hint}; allowed: {', '.join(COMMANDS)}.", file=sys.stderr)
        return 2
    if argv is None and arguments[0] in BELOW:
        from asyncrlhf.cli.parent import above

        one_run = arguments[0] == "train" and not {"-m", "--multirun"} & set(arguments)
        asked = [int(word[9:]) for word in arguments if word.startswith("restarts=") and word[9:].isdigit()]
        return above(lambda further: _run(_with(arguments, further)), ([0, *asked])[-1] if one_run else None)
    return _run(arguments)


def _with(arguments: Sequence[str], further: Sequence[str]) -> list[str]:
    """The arguments with further overrides in place of their own."""
    keys = tuple(f"{word.partition('=')[0]}=" for word in further)
    return [*(word for word in arguments if not (keys and word.startswith(keys))), *further]


def _run(arguments: Sequence[str]) -> int:
    if not sys.warnoptions:  # byte-compiling a library for the first time warns of its code, between our lines
        warnings.filterwarnings("ignore", category=SyntaxWarning)
    from asyncrlhf.orchestrator.start.interruption import like_ctrl_c

    none_seen()
    try:
        with rare_collections(), like_ctrl_c():
            return _call(*COMMANDS[arguments[0]], arguments[1:])
    except KeyboardInterrupt:  # a second signal, or one after the command
        return by_signal()


def _call(module: str, function: str, arguments: Sequence[str]) -> int:
    """Import and call the command; returns its exit code, also for an error, of which it has printed one sentence."""
    try:
        return int(getattr(importlib.import_module(module), function)(arguments))
    except SystemExit as end:  # argparse and Hydra answer --help so
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        print("asyncrlhf: interrupted.", file=sys.stderr)
        return by_signal()
    except Exception as error:
        return ended_by(error)


def ended_by(error: Exception, where: str = "", folder: Path | None = None) -> int:
    """Print one sentence about the error, after ``where``; returns the exit code. ``folder``: of the trace of an
    unforeseen one, by default the temporary folder."""
    if not isinstance(error, AsyncRLHFError):
        return _unforeseen(error, where, folder)
    # Messages of other libraries, quoted in ours, may have several lines.
    said = shortage(error) or " ".join(str(error).split())
    print(f"asyncrlhf: {printable(redact(where + said))}", file=sys.stderr)
    return error.exit_code


def printable(text: str) -> str:
    """The user's text with control characters escaped: a terminal would interpret them."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _unforeseen(error: Exception, where: str, folder: Path | None) -> int:
    """One sentence for an unforeseen error, of this package or of a user's code; the traceback goes to a file."""
    if lacks := shortage(error):
        print(f"asyncrlhf: {redact(where + lacks)}", file=sys.stderr)
        return 1
    trace = getattr(error, "trace_file", None)  # of a run, which has written it to its own folder
    if trace is None:
        trace = _trace_file("".join(traceback.format_exception(error)), folder)
    first = next(iter(str(error).strip().splitlines()), "").rstrip(".")
    print(
        f"asyncrlhf: {redact(where)}{type(error).__name__}: {redact(first)}. The trace is in {trace}.", file=sys.stderr
    )
    return 1


def _trace_file(trace: str, folder: Path | None) -> str:
    """A new file in the folder, which keeps this user's newest ``TRACES``."""
    with tempfile.NamedTemporaryFile("w", prefix="asyncrlhf-error-", suffix=".txt", dir=folder, delete=False) as file:
        file.write(redact(trace))
    with suppress(OSError):
        found = [
            path for path in Path(file.name).parent.glob("asyncrlhf-error-*.txt") if path.stat().st_uid == os.getuid()
        ]
        for old in sorted(found, key=lambda path: path.stat().st_mtime_ns)[:-TRACES]:
            old.unlink()
    return file.name


class Unbreakable:
    """A standard stream whose reader may close it (``asyncrlhf train | head -1``): later output is lost without an
    error."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._lose()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._lose()

    def _lose(self) -> None:
        """From now on, discard all output of the process and its libraries to this descriptor."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
