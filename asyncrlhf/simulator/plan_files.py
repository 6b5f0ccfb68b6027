"""The files of a plan: an experiment for ``train``, its figures as JSON, and a page; and the comparison with a run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import yaml
from plotly.offline import get_plotlyjs
from rich.console import Console
from rich.table import Column, Table

from asyncrlhf.config.compose import load_config
from asyncrlhf.config.conversion import to_plain
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.errors import ConfigError
from asyncrlhf.planner.choose import Chosen
from asyncrlhf.planner.explain import reason, seconds_in_words, sentences, sources, weakest
from asyncrlhf.planner.ranking import Subject, bytes_of, costs_of
from asyncrlhf.records.write.recorder import METRICS_FILE, read_metrics
from asyncrlhf.report.load import Run, load_run
from asyncrlhf.report.timeline import read_spans, section
from asyncrlhf.simulator.given import check_run
from asyncrlhf.simulator.simulate import figures

STEPS = 3  # that the timeline shows
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
    best = chosen.best
    generator, learner = bytes_of(best.layout, subject)
    known, costs = sources(best.layout, subject), costs_of(best.layout, subject)
    return {
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


def render(plan: Mapping[str, Any], run: Run) -> str:
    """HTML that opens without a network. ``plan``: the content of its JSON file; ``run``: one of its simulated runs."""
    folder = resources.files("asyncrlhf.report")
    style, script = ((folder / name).read_text(encoding="utf-8") for name in ("page.css", "tables.js"))
    table = read_spans(run)
    spans = 0 if table is None else len(table["start"])
    words = "".join(f"<p>{escape(sentence)}</p>" for sentence in plan["words"])
    others = "".join(f"<li>{escape(other['reason'])}</li>" for other in plan["others"])
    refused = "".join(f"<li>{escape(sentence)}</li>" for sentence in plan["refused"])
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>Plan</title><style>{style}</style>'
        f"<script>{get_plotlyjs()}</script></head><body><main><h1>Plan</h1>{words}"
        f"<h2>Seconds per step against staleness</h2>{_trade_off(plan)}"
        f"<h2>{STEPS} simulated steps</h2>{section(run, max(1, round(spans * STEPS / max(1, len(run.rows)))))}"
        f"<h2>Simulated, not chosen</h2><ul>{others}</ul>"
        f"<h2>Refused ({plan['refused_count']})</h2><ul>{refused or '<li>nothing</li>'}</ul></main>"
        f"<script>{script}</script></body></html>"
    )


def _trade_off(plan: Mapping[str, Any]) -> str:
    """One point per simulated layout; hovering shows its settings."""
    figure = go.Figure()
    chosen = {"layout": plan["layout"], "predicted": plan["predicted"], "reason": "chosen"}
    for name, entries, color, size in (
        ("others", plan["others"], "#4c78a8", 8),
        ("chosen", [chosen], "#e45756", 13),
    ):
        figure.add_scatter(
            x=[entry["predicted"]["step_seconds"] for entry in entries],
            y=[entry["predicted"]["staleness"] for entry in entries],
            text=[entry["reason"] for entry in entries],
            mode="markers",
            name=name,
            marker={"color": color, "size": size},
            hovertemplate="%{text}<br>%{x:.4g} s, staleness %{y:.2f}<extra></extra>",
        )
    figure.update_layout(template="plotly_white", margin={"l": 10, "r": 10, "t": 10, "b": 44}, height=340)
    figure.update_xaxes(title="seconds per step", rangemode="tozero")
    figure.update_yaxes(title="mean staleness, versions", rangemode="tozero", automargin=True)
    return str(figure.to_html(include_plotlyjs=False, full_html=False, config={"displayModeBar": False}))


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
    try:
        given = json.loads(plan.read_text(encoding="utf-8"))
        predicted, bound = dict(given["predicted"]), int(given["layout"]["max_staleness"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{plan} is not a plan written by `asyncrlhf plan`: {error}.") from error
    check_run(run)
    rows = read_metrics(run / METRICS_FILE)
    if len(rows) < 4:
        raise ConfigError(f"{run} has {len(rows)} learner steps; a comparison needs at least 4.")
    measured = figures(rows, bound)
    table = Table("", *(Column(name, justify="right") for name in ("predicted", "measured", "error")))
    for name, want, have, apart in compared(predicted, measured):
        table.add_row(name, f"{want:.4g}", f"{have:.4g}", apart)
    Console().print(table)
    print(profile_again(predicted, measured))
