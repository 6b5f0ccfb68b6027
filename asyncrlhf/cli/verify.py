"""``asyncrlhf verify``: whether runs kept their guarantees, recomputed from their raw records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from asyncrlhf.errors import ConfigError
from asyncrlhf.records.write.journal import JOURNAL_FILE
from asyncrlhf.records.write.recorder import METRICS_FILE
from asyncrlhf.validation import check

HELP = """asyncrlhf verify RUN...: checks the guarantees of runs against their raw records

  asyncrlhf verify runs/arithmetic/2026-01-31_12-00-00      one run: ended, killed, or still running
  asyncrlhf verify runs/sweeps/staleness_quick-1a2b3c4d     every run below a folder

It looks for rollouts that are lost, doubled or trained too often, for tokens over the staleness bound or of a version
that their replica never had, for publishes that were never acknowledged, for steps done twice by a resumed run, and for
figures in metrics.jsonl and summary.json that contradict the records. It only reads files.

Exit codes: 0 all guarantees hold, 1 one is broken, 2 no run, 130 interrupted."""


def main(arguments: Sequence[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(HELP)
        return 0
    options = [argument for argument in arguments if argument.startswith("-")]
    check(not options, f"{options and options[0]} is not an option of verify; write asyncrlhf verify RUN [RUN ...].")
    check(arguments, "verify needs a run's directory; write asyncrlhf verify RUN [RUN ...].")
    from asyncrlhf.records.read.verify import examine  # pyarrow: half a second that a wrong word need not cost

    broken, refused, seen = 0, list[str](), 0
    runs = [run for argument in arguments for run in find_runs(Path(argument).expanduser())]
    for run in runs:
        try:
            verdict = examine(run)
        except ConfigError as error:
            if len(runs) == 1:
                raise
            refused.append(str(error))
            continue
        seen += 1
        broken += bool(verdict.broken)
        how = "holds" if not verdict.broken else f"BROKEN in {len(verdict.broken)} ways"
        print(f"{run}: {how} ({verdict.summary}).")
        print("".join(f"  broken: {sentence}\n" for sentence in verdict.broken), end="")
        print("".join(f"  {sentence}\n" for sentence in verdict.notes), end="")
    for sentence in refused:
        print(f"Passed over: {sentence}")
    check(seen, f"There is no run of asyncrlhf train below {', '.join(arguments)}.")
    if seen > 1:
        print(f"{seen} runs: {seen - broken} hold, {broken} are broken.")
    return 1 if broken else 0


def find_runs(path: Path) -> list[Path]:
    """The run itself, or every run below the folder."""
    files = (METRICS_FILE, JOURNAL_FILE)
    if not path.is_dir() or any((path / name).is_file() for name in files):
        return [path]
    return sorted({file.parent for name in files for file in path.rglob(name)}) or [path]
