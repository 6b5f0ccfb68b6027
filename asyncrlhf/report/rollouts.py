"""The report's rollout browser: a sample of trained rollouts, token by token, from ``rollout_tokens/*.parquet``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from asyncrlhf.records.write.rollout_tokens import TOKENS_FOLDER
from asyncrlhf.report.load import Run

MAX_ROLLOUTS = 200  # of one run
MAX_BYTES = 4_000_000  # of all runs of a page
MAX_TOKENS = 2000  # of one rollout
_COLUMNS = [
    "step", "rollout_id", "reward", "prompt", "tokens", "policy_versions", "loss_mask", "importance_weight",
    "behavior_logprobs", "policy_logprobs",
]  # fmt: skip


def section(run: Run, max_bytes: int = MAX_BYTES) -> str:
    """One run's browser as self-contained HTML of at most ``max_bytes``; empty if the run has no recorded tokens."""
    files = sorted((run.path / TOKENS_FOLDER).glob("steps-*.parquet"))
    if not files:
        return ""
    chosen, recorded = _chosen(files, max_bytes - len(_STYLE + _BODY + _SCRIPT) - 200)
    # "<" is never in the page's source, so that no text of a rollout can end the script that holds it.
    data = json.dumps({"rollouts": chosen, "recorded": recorded}, separators=(",", ":")).replace("<", "\\u003c")
    return f"{_STYLE}<div class='rollouts'>{_BODY}<script type='application/json'>{data}</script>{_SCRIPT}</div>"


def _chosen(files: list[Path], max_bytes: int) -> tuple[list[dict[str, Any]], int]:
    """(rollouts for the page in the order of their steps, number of recorded ones). They are spread evenly over the
    run; fewer if the bytes do not suffice."""
    counts = [pq.read_metadata(file).num_rows for file in files]
    recorded, first = sum(counts), np.concatenate([[0], np.cumsum(counts)])
    wanted = np.unique(np.linspace(0, recorded - 1, min(MAX_ROLLOUTS, recorded)).round().astype(int))
    found: dict[int, dict[str, Any]] = {}
    for number, file in enumerate(files):
        here = wanted[(wanted >= first[number]) & (wanted < first[number + 1])] - first[number]
        if len(here):
            rows = pq.read_table(file, columns=_COLUMNS).take(pa.array(here)).to_pylist()
            found |= {int(first[number] + i): _compact(row) for i, row in zip(here, rows, strict=True)}
    order = np.random.default_rng(0).permutation(wanted)
    kept, room = [], max_bytes
    for index in order.tolist():
        # The page's own escape of "<" makes six bytes of one.
        text = json.dumps(found[index], separators=(",", ":"))
        size = len(text) + 5 * text.count("<") + 1
        if size <= room:
            kept.append(index)
            room -= size
    return [found[index] for index in sorted(kept)], recorded


def _compact(row: Mapping[str, Any]) -> dict[str, Any]:
    """A rollout in the form of the page's script; long ones are cut."""
    shown = slice(0, MAX_TOKENS)
    versions, weights = row["policy_versions"], np.array(row["importance_weight"], np.float64)
    mask = np.array(row["loss_mask"], bool)
    return {
        "s": row["step"],
        "i": row["rollout_id"],
        "r": _short(row["reward"]),
        "a": row["step"] - 1 - min(versions),
        "w": _short(weights[mask].mean()) if mask.any() else None,
        "p": row["prompt"],
        "t": row["tokens"][shown],
        "n": len(row["tokens"]),
        "v": versions[shown],
        "x": [_short(x) for x in weights[shown]],
        "b": [_short(x) for x in row["behavior_logprobs"][shown]],
        "c": [_short(x) for x in row["policy_logprobs"][shown]],
        "m": [i for i, trains in enumerate(row["loss_mask"][shown]) if not trains],
    }


def _short(value: float | None) -> float | None:
    """Three decimals; None for a value that is not a number."""
    return round(float(value), 3) if value is not None and np.isfinite(value) else None


_STYLE = """<style>
.rollouts .bar { display: flex; flex-wrap: wrap; gap: .5rem 1rem; align-items: center; margin: .4rem 0; }
.rollouts input, .rollouts select, .rollouts button { font: inherit; padding: .2rem .4rem; max-width: 100%; }
.rollouts input { flex: 1 1 12rem; min-width: 0; }
.rollouts .card { border: 1px solid #e3e3e3; border-radius: 6px; padding: .5rem .7rem; margin: .5rem 0; }
.rollouts .facts { color: #666; font-size: 13px; font-variant-numeric: tabular-nums; }
.rollouts .facts b { color: #222; }
.rollouts .text { font: 13px/1.7 ui-monospace, Menlo, Consolas, monospace; white-space: pre-wrap; }
.rollouts .text { overflow-wrap: anywhere; max-height: 22rem; overflow-y: auto; }
.rollouts .prompt { color: #777; }
.rollouts .text span { border-radius: 2px; }
.rollouts .text .out { text-decoration: line-through; opacity: .55; }
.rollouts .key i { display: inline-block; width: 1.1em; height: .8em; margin: 0 .3em 0 .7em; vertical-align: -.05em; }
.rollouts .key { font-size: 13px; color: #444; } .rollouts .key span { margin-left: .9em; }
</style>"""

_BODY = """<div class="bar"><input type="search" placeholder="search prompts and responses" aria-label="search">
<label>sort by <select class="sort"><option value="s">step</option><option value="r">reward</option>
<option value="a">age (versions)</option><option value="w">mean weight</option></select></label>
<label><input class="down" type="checkbox" style="flex:none"> largest first</label>
<label>colour <select class="color"><option value="x">importance weight</option>
<option value="v">policy version</option>
<option value="">none</option></select></label></div>
<p class="note count"></p><p class="key"></p><div class="cards"></div><button class="more">Show more</button>"""

# Texts reach the page by ``textContent`` alone.
_SCRIPT = """<script>
(function () {
  const root = document.currentScript.parentElement, pick = (name) => root.querySelector(name);
  const data = JSON.parse(pick('script[type="application/json"]').textContent), STEP = 20;
  const ages = data.rollouts.flatMap((r) => r.v.map((v) => r.s - 1 - v)), oldest = Math.max(1, ...new Set(ages));
  let limit = STEP;
  data.rollouts.forEach((r) => { r.text = (r.p + '\\n' + r.t.join('')).toLowerCase(); });
  function make(parent, tag, name, text) {
    const made = document.createElement(tag);
    if (name) made.className = name;
    if (text !== undefined) made.textContent = text;
    return parent.appendChild(made);
  }
  const byAge = (age) => 'hsl(' + (140 - 120 * Math.min(1, age / oldest)) + ',65%,80%)';
  function byWeight(w) {
    if (w === null) return '#ddd';
    const far = Math.max(-1, Math.min(1, Math.log2(Math.max(w, 1e-6)) / 2));
    return 'hsl(' + (far < 0 ? 215 : 25) + ',85%,' + (97 - 32 * Math.abs(far)) + '%)';
  }
  function key(how) {
    const shown = pick('.key');
    shown.textContent = '';
    const add = (color, text) => { make(shown, 'i').style.background = color; shown.append(text); };
    if (how === 'v') [...new Set([0, 1, Math.ceil(oldest / 2), oldest])].forEach(
      (age) => add(byAge(age), age + (age === 1 ? ' version old' : ' versions old')));
    if (how === 'x') [0.25, 0.5, 1, 2, 4].forEach((w) => add(byWeight(w), 'weight ' + w));
    if (how) make(shown, 'span', '', 'struck through: not in the loss');
  }
  const say = (x, digits) => x === null ? 'none' : x.toFixed(digits);
  function card(parent, r, how) {
    const box = make(parent, 'div', 'card'), facts = make(box, 'div', 'facts');
    make(facts, 'b', '', 'reward ' + say(r.r, 3));
    facts.append(', age ' + r.a + ', mean weight ' + say(r.w, 3) + ', step ' + r.s + ', rollout ' + r.i + ', '
      + r.n + ' tokens');
    const text = make(box, 'div', 'text'), out = new Set(r.m);
    make(text, 'span', 'prompt', r.p);
    text.append('\\n');
    r.t.forEach((piece, i) => {
      const token = make(text, 'span', 'token' + (out.has(i) ? ' out' : ''), piece);
      token.title = 'version ' + r.v[i] + ', weight ' + say(r.x[i], 3) + ', log-prob of the generator '
        + say(r.b[i], 3) + ', of the learner ' + say(r.c[i], 3);
      if (how === 'v') token.style.background = byAge(r.s - 1 - r.v[i]);
      if (how === 'x') token.style.background = byWeight(r.x[i]);
    });
    if (r.t.length < r.n) make(text, 'span', 'prompt', ' ... ' + (r.n - r.t.length) + ' more tokens');
  }
  function draw() {
    const asked = pick('input[type="search"]').value.toLowerCase(), by = pick('.sort').value;
    const how = pick('.color').value, sign = pick('.down').checked ? -1 : 1;
    const found = data.rollouts.filter((r) => r.text.includes(asked));
    const order = (one, other) => sign * (one[by] - other[by]) || one.i - other.i;
    found.sort((one, other) => (one[by] === null) - (other[by] === null) || order(one, other));
    const shown = Math.min(limit, found.length);
    pick('.count').textContent = shown + ' of ' + found.length + (asked ? ' that match' : '') + ' listed; '
      + data.rollouts.length + ' of ' + data.recorded + ' recorded rollouts shown in this page.';
    const cards = pick('.cards');
    cards.textContent = '';
    found.slice(0, shown).forEach((r) => card(cards, r, how));
    pick('.more').style.display = shown < found.length ? '' : 'none';
    key(how);
  }
  pick('.more').onclick = () => { limit += STEP; draw(); };
  root.querySelectorAll('input, select').forEach((e) => e.addEventListener('input', () => { limit = STEP; draw(); }));
  draw();
})();
</script>"""
