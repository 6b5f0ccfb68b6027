"""One training run from its config, its summary in words, and its report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from asyncrlhf.cli.first_look import first_look
from asyncrlhf.cluster import forked_workers
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.errors import AsyncRLHFError, shortage
from asyncrlhf.last_words import by_signal
from asyncrlhf.redaction import redact

# Errors of drawing unforeseen figures or of full disks; the run itself is done and safe by then.
REPORT_TROUBLE = (AsyncRLHFError, ArithmeticError, LookupError, OSError, RuntimeError, TypeError, ValueError)


def run(config: RunConfig) -> int:
    first_look(config)
    if config.run_dir and config.checkpoint.resume == "no":
        from asyncrlhf.records.write.record_marker import refuse_used_folder

        refuse_used_folder(Path(config.run_dir))
    if config.logging.progress != "none":  # the run's own display does not exist yet
        print("Loading PyTorch, transformers and Ray, then checking model, data and rewards.", flush=True)
    if config.runtime == "ray" and not config.ray.cluster:
        forked_workers.begin()
    try:
        from asyncrlhf.orchestrator.run import train
        from asyncrlhf.records.show.summary import plain_words

        summary = train(config)
    finally:
        forked_workers.drop()
    print(plain_words(summary))
    if config.logging.report and summary["exit_reason"] == "done":
        print(draw([Path(summary["run_dir"])]))
    return by_signal() if summary["exit_reason"] == "interrupted" else 0


def draw(folders: Sequence[Path], out: Path | None = None) -> str:
    """Draw the report of runs that ended well; returns a sentence with its place, or with the reason of a failure."""
    from asyncrlhf.report.html import build_report

    try:
        return f"Report: {build_report(folders, out)}"
    except REPORT_TROUBLE as error:
        shown = " ".join(map(str, folders))
        cause = shortage(error) or f"{type(error).__name__}: {error}"
        return f"The report could not be drawn ({redact(cause)}); try: asyncrlhf report {shown}"
