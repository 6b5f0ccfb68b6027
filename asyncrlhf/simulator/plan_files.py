"""The files of a plan: an experiment for ``train``, its figures as JSON, and a page; and the comparison with a run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console
from rich.table import Column, Table

from asyncrlhf.config.compose import load_config
from asyncrlhf.config.conversion import to_plain
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.errors import ConfigError
from asyncrlhf.records.write.recorder import METRICS_FILE, read_metrics

if TYPE_CHECKING:
    from asyncrlhf.planner.choose import Chosen
    from asyncrlhf.planner.ranking import Subject

FORMAT = 1
SHOWN = 40  # refused and other layouts listed in a plan's file
COMPARED = (
    "step_seconds", "train_seconds", "weight_sync_seconds", "learner_idle", "generator_idle", "staleness",
    "dropped_share",
)  # fmt: skip
SHARES = ("learner_idle", "generator_idle", "dropped_share")


def write_plan(
    out: Path, config: RunConfig, chosen: Chosen, subject: Subject, run: Path, made_of: Sequence[str]
) -> list[Path]:
    """Write FOLDER/experiment/NAME.yaml, FOLDER/NAME.json and FOLDER/NAME.html; ``run``: a simulated run of the plan.

    Returns their paths. Raises ConfigError if they cannot be written.
    """
    from asyncrlhf.report.load import load_run
    from asyncrlhf.simulator.plan_page import render

    facts = {"made_of": list(made_of), **as_json(chosen, subject)}
    paths = [
        out.parent / "experiment" / f"{out.name}.yaml",
        *(out.parent / f"{out.name}.{end}" for end in ("json", "html")),
    ]
    texts = [experiment(config, facts["words"]), json.dumps(facts, indent=1) + "\n", render(facts, load_run(run))]
    try:
        paths[0].parent.mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, texts, strict=True):
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"plan: {out} cannot be written: {error}.") from error
    return paths


def experiment(config: RunConfig, words: Sequence[str]) -> str:
    """The differences from the defaults, as an experiment file."""
    changes = _differences(to_plain(config, whole=True), to_plain(load_config([]), whole=True))
    for key in ("run_dir", "checkpoint"):
        changes.pop(key, None)
    said = "".join(f"# {line}\n" for line in words[:1])
    return f"# @package _global_\n{said}{yaml.safe_dump(changes, sort_keys=False)}"


def _differences(given: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in given.items():
        before = usual.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping) and before:
            if inner := _differences(value, before):
                found[key] = inner
        elif value != before:
            found[key] = value
    return found


def as_json(chosen: Chosen, subject: Subject) -> dict[str, Any]:
    """The choice as the content of a plan's file."""
    from asyncrlhf.planner.explain import reason, sentences, sources, weakest
    from asyncrlhf.planner.ranking import bytes_of, costs_of

    best = chosen.best
    generator, learner = bytes_of(best.layout, subject)
    known, costs = sources(best.layout, subject), costs_of(best.layout, subject)
    return {
        "format": FORMAT,
        "layout": asdict(best.layout),
        "predicted": {**best.figures},
        "closed_forms": asdict(best.estimate),
        "memory": {"rank": dict(learner.parts), "generator_device": dict(generator.parts)},
        "seeds": best.seeds,
        "sources": known,
        "weakest_source": weakest(known),
        "publish": {"snapshot": costs.snapshot, "transfer": costs.transfer, "load": costs.load},
        "others": [
            {"layout": asdict(c.layout), "predicted": {**c.figures}, "reason": reason(c, best)}
            for c in chosen.others[:SHOWN]
        ],
        "refused": list(chosen.refused.values())[:SHOWN],
        "refused_count": len(chosen.refused),
        "fitting_layouts": chosen.seen,
        "words": sentences(chosen, subject),
    }


def compared(predicted: Mapping[str, float], measured: Mapping[str, float]) -> list[tuple[str, float, float, str]]:
    """Rows of (figure, predicted, measured, error); the error is relative, for shares and versions a difference."""
    rows = []
    for name in COMPARED:
        if name not in predicted or not math.isfinite(measured.get(name, math.nan)):
            continue
        want, have = predicted[name], measured[name]
        apart = name in SHARES or name == "staleness" or not have
        rows.append((name, want, have, f"{want - have:+.3f}" if apart else f"{want / have - 1:+.1%}"))
    return rows


def profile_again(predicted: Mapping[str, float], measured: Mapping[str, float]) -> str:
    """One sentence about the costs with the largest error."""
    from asyncrlhf.planner.explain import seconds_in_words

    named = {"train_seconds": "the learner's step", "weight_sync_seconds": "publishing"}
    off = {n: abs(predicted[n] - measured.get(n, math.nan)) for n in named if n in predicted}
    off = {n: apart for n, apart in off.items() if math.isfinite(apart)}
    step = measured["step_seconds"]
    rest = abs(predicted["step_seconds"] - step)
    if rest <= 0.1 * step:
        return "The step is within 10% of the plan."
    worst = max(off, key=lambda n: off[n], default="")
    if worst and off[worst] >= 0.5 * rest:
        return (
            f"Measure {named[worst]} again: it is off by {seconds_in_words(off[worst])} (asyncrlhf profile --from RUN)."
        )
    return (
        "Neither the learner's step nor publishing explains the error: measure decoding (asyncrlhf profile --from RUN)."
    )


def compare(plan: Path, run: Path) -> None:
    """Print the plan's predictions and the run's measurements."""
    from asyncrlhf.simulator.given import check_run, settings_of_run
    from asyncrlhf.simulator.simulate import figures

    try:
        given = json.loads(plan.read_text(encoding="utf-8"))
        predicted, bound = dict(given["predicted"]), int(given["layout"]["max_staleness"])
        if given["format"] != FORMAT:
            raise ValueError(f"format {given['format']}; this version reads {FORMAT}")
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{plan} is not a plan written by `asyncrlhf plan`: {error}.") from error
    check_run(run)
    settings_of_run(run, ())
    rows = read_metrics(run / METRICS_FILE)
    if len(rows) < 4:
        raise ConfigError(f"{run} has {len(rows)} learner steps; a comparison needs at least 4.")
    measured = figures(rows, bound)
    table = Table("", *(Column(name, justify="right") for name in ("predicted", "measured", "error")))
    for name, want, have, apart in compared(predicted, measured):
        table.add_row(name, f"{want:.4g}", f"{have:.4g}", apart)
    Console().print(table)
    print(profile_again(predicted, measured))
