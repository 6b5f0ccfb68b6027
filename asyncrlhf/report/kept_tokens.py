"""The report's pictures of a smaller cache: which tokens of a few responses each layer and head had at the end."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from asyncrlhf.records.write.rollout_tokens import TOKENS_FOLDER
from asyncrlhf.report.load import Run

PICTURES = 3  # of one run
MAX_ROWS = 16  # layers and heads of one picture
MAX_TOKENS = 400
_COLUMNS = ["step", "rollout_id", "reward", "tokens", "stayed"]
_STYLE = (
    "<style>.stayed { font: 12px/1.5 ui-monospace, Menlo, Consolas, monospace; white-space: pre; overflow-x: auto; "
    "color: #999; border: 1px solid #e3e3e3; border-radius: 6px; padding: .5rem .7rem; margin: .5rem 0; } "
    ".stayed b { color: #fff; background: #333; box-shadow: inset 1px 0 #fff; } .stayed i { color: #222; }</style>"
)


def section(run: Run) -> str:
    """Pictures of rollouts spread over the run's recorded ones; empty if none was compared with the whole cache."""
    places: list[tuple[Any, int]] = []
    for file in sorted((run.path / TOKENS_FOLDER).glob("steps-*.parquet")):
        if "stayed" in pq.read_schema(file).names:
            known = pq.read_table(file, columns=["stayed"])["stayed"].is_valid().to_numpy()
            places += [(file, int(i)) for i in np.flatnonzero(known)]
    if not places:
        return ""
    chosen = np.unique(np.linspace(0, len(places) - 1, PICTURES).round().astype(int))
    rows = [pq.read_table(places[i][0], columns=_COLUMNS).take(pa.array([places[i][1]])).to_pylist()[0] for i in chosen]
    note = (
        f"{len(rows)} of {len(places)} recorded rollouts with this. Dark: tokens that were in the cache at the "
        "response's end. Before the newest ones, which always stay, these are what <code>generator.cache</code> chose: "
        "under <code>chunk_sink</code> the ends of the chunks. The prompt, which stays as well, is left out."
    )
    return f'{_STYLE}<p class="note">{note}</p>{"".join(map(_picture, rows))}'


def _picture(row: dict[str, Any]) -> str:
    same: dict[tuple[bool, ...], list[str]] = {}  # under chunk_sink most layers choose alike
    for name, stays in row["stayed"]:
        same.setdefault(tuple(stays), []).append(name)
    bits = list(same)
    names = [of[0] + (f" and {len(of) - 1} like it" if len(of) > 1 else "") for of in same.values()]
    shown = np.unique(np.linspace(0, len(names) - 1, MAX_ROWS).round().astype(int))
    texts = ["".join(c if c.isprintable() else "\N{MIDDLE DOT}" for c in text) for text in row["tokens"]][:MAX_TOKENS]
    width = max(map(len, names))
    lines = [f"<i>{names[i]:{width}}</i>  {_line(texts, bits[i])}" for i in shown]
    cut = [f"{len(shown)} of {len(names)} different ones"] if len(shown) < len(names) else []
    cut += [f"the first {len(texts)} tokens"] if len(texts) < len(row["tokens"]) else []
    stay = f"{sum(bits[0])} of {len(bits[0])} tokens stay in each layer and head"
    head = f"step {row['step']}, rollout {row['rollout_id']}, reward {row['reward']:.3f}: {stay}"
    said, picture = "; shown: ".join(filter(None, [head, ", ".join(cut)])), "\n".join(lines)
    return f'<p class="note">{said}</p><div class="stayed">{picture}</div>'


def _line(texts: list[str], stays: Sequence[bool]) -> str:
    """The response's tokens, those that stay in ``<b>``."""
    return "".join(f"<b>{escape(text)}</b>" if kept else escape(text) for text, kept in zip(texts, stays, strict=False))
