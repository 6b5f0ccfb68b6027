"""``asyncrlhf status RUN``: what each part of a live run waits for, and how a finished run ended."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from asyncrlhf.errors import ConfigError
from asyncrlhf.records.show.summary import duration
from asyncrlhf.records.write.journal import JOURNAL_FILE
from asyncrlhf.records.write.recorder import CONFIG_FILE, SUMMARY_FILE
from asyncrlhf.records.write.run_lock import is_owned
from asyncrlhf.records.write.status import read_status
from asyncrlhf.validation import check

HELP = """asyncrlhf status RUN: what a live run does and waits for, or how a finished one ended

  asyncrlhf status runs/arithmetic/2026-01-31_12-00-00

It only reads files, so it also works when the run's processes hang."""
SILENT_SECONDS = 10.0  # without a word, where there should be one a second


def main(arguments: Sequence[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(HELP)
        return 0
    check(len(arguments) == 1, f"status takes one run directory, not {len(arguments)}: asyncrlhf status RUN.")
    check(not arguments[0].startswith("-"), f"{arguments[0]} is not an option of status; write asyncrlhf status RUN.")
    run_dir = Path(arguments[0]).expanduser()
    check(run_dir.is_dir(), f"{run_dir} is not a folder; give a run's, such as runs/arithmetic/2026-01-31_12-00-00.")
    if not (run_dir / CONFIG_FILE).is_file():
        raise ConfigError(
            f"{run_dir} is not a run: it holds no {CONFIG_FILE}; the runs of a name lie one folder deeper."
        )
    for line in status_lines(run_dir, time.time()):
        print(line)
    return 0


def status_lines(run_dir: Path, now: float) -> Iterator[str]:
    """``now``: seconds since the epoch."""
    try:
        summary = json.loads((run_dir / SUMMARY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        summary = None
    if isinstance(summary, dict):
        yield from _finished(run_dir, summary)
    else:
        yield from _unfinished(run_dir, read_status(run_dir), now)
    yield from _deaths(run_dir / JOURNAL_FILE)


def _deaths(journal: Path) -> Iterator[str]:
    """How often each part died, and of what the last time."""
    found: dict[str, list[str]] = {}
    if journal.is_file():
        with journal.open(encoding="utf-8") as lines:
            for line in lines:
                if '"event":"died"' in line and line.endswith("\n"):
                    with suppress(ValueError, KeyError, TypeError):  # a damaged line; verify names it
                        event = json.loads(line)
                        found.setdefault(str(event["replica"]), []).append(str(event["reason"]))
    for name, reasons in sorted(found.items()):
        yield f"{name} died {'once' if len(reasons) == 1 else f'{len(reasons)} times, the last time'}: {reasons[-1]}"


def _finished(run_dir: Path, summary: Mapping[str, Any]) -> Iterator[str]:
    reason = str(summary.get("exit_reason", "ended"))
    yield f"{run_dir}: {reason} after step {summary.get('steps')} of {summary.get('steps_planned')}."
    ledger = summary.get("ledger", {})
    if "trained" in ledger:
        dropped, failed = (sum(ledger.get(key, {}).values()) for key in ("dropped", "failed"))
        left = ledger.get("left", 0)
        yield f"Rollouts: {ledger['trained']} trained, {dropped} dropped, {failed} failed, {left} left."
    if reason.startswith("failed") and (run_dir / "error.txt").is_file():
        yield f"The trace is in {run_dir / 'error.txt'}."


def _unfinished(run_dir: Path, status: Mapping[str, Any] | None, now: float) -> Iterator[str]:
    owned = is_owned(run_dir)
    if status is None:
        yield f"{run_dir}: {'is beginning or ending' if owned else 'its process ended without a summary'}."
        return
    who = f"process {status['pid']} on {status['host']}"
    # Not negative where the clock was set back meanwhile.
    written, answered = (max(0.0, now - at) for at in (status["written"], status.get("answered", status["written"])))
    # A file system between machines may not share locks, but it shares what a live process writes each second.
    owned = owned or (status["host"] != socket.gethostname() and written <= SILENT_SECONDS)
    if not owned:
        yield f"{run_dir}: {who} is gone, without a summary: it was killed {duration(written)} ago. What it was at:"
    elif written > SILENT_SECONDS:
        yield f"{run_dir}: {who} does not answer: it has been frozen for {duration(written)}. What it was at:"
    elif answered > SILENT_SECONDS:
        yield f"{run_dir}: {who} lives, but its event loop has not answered for {duration(answered)}. What it was at:"
    else:
        yield f"{run_dir}: {who} {status['doing']}."
    yield from _figures(status)


def _figures(status: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"Step {status['step']} of {status['steps']}; published version {status['published_version']}; "
        f"{status['buffer']} rollouts in the buffer, {status['in_flight']} in flight, "
        f"{status['waiting_to_be_issued_again']} to be issued again."
    )
    yield f"Last movement {status['seconds_without_movement']:.1f} s ago."
    if restarts := status["restarts"]:
        yield f"Restarts: {', '.join(f'{name} {count}' for name, count in sorted(restarts.items()))}."
    yield from status["waits"]
