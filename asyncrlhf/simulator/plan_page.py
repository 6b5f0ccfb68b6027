"""The page of a plan: its sentences, step time against staleness of all simulated layouts, and its timeline."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from importlib import resources
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from asyncrlhf.report.load import Run
from asyncrlhf.report.timeline import read_spans, section

STEPS = 3  # that the timeline shows


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
