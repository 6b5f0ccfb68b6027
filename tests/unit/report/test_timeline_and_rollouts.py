"""The report's timeline and rollout browser: bounded, honest about what is left out, safe with any text."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrlhf.records.write.rollout_rows import RolloutRow, write_part
from asyncrlhf.records.write.rollout_tokens import TokenRecord
from asyncrlhf.records.write.spans import Span, SpanRow, write_spans
from asyncrlhf.report import rollouts, timeline
from asyncrlhf.report.load import Run
from asyncrlhf.turns import Fork, Turn
from asyncrlhf.types import OBSERVED

HOSTILE = "a</script><script>document.title='broken'</script> \"quoted\" & <b>'bold'</b> 🙂 \ud83d <!-- \u2028"
CHROMIUM = shutil.which("chromium")


def run_at(folder: Path) -> Run:
    return Run(folder, "runs/a", [], {}, {}, None)


def write_timeline(folder: Path, spans: int, parts: int = 3) -> None:
    """Each part decodes for a second, then waits for one."""
    (folder / "spans").mkdir(parents=True)
    rows = [
        SpanRow(f"generator-{part}", Span(("decode", "wait")[i % 2], float(i), i + 1.0, i, 2, 30, 4, 8, 1.0))
        for i in range(spans // parts)
        for part in range(parts)
    ]
    half = len(rows) // 2
    write_spans(folder / "spans" / "part-00000.parquet", rows[half:])
    write_spans(folder / "spans" / "part-00001.parquet", rows[:half])


class Characters:
    """A tokenizer of one character a token."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(map(chr, ids))


def write_tokens(
    folder: Path, count: int, text: str = "abc", prompt: str = "1+1=", versions: tuple[int, ...] = ()
) -> None:
    """Rollout i has reward i, age i % 3 (or the given versions) and the weight 2^-(i % 5)."""
    record = TokenRecord(folder / "rollout_tokens", 0, Characters)
    ids, ones = [ord(letter) for letter in text], np.ones(len(text), np.float32)
    rows = []
    for i in range(count):
        row: dict[str, Any] = {
            "rollout_id": i, "group_id": i, "reward": float(i), "weight": 1.0, "prompt": prompt,
            "prompt_ids": [1], "response_ids": ids, "policy_versions": versions or [9 - i % 3] * len(text),
            "loss_mask": [version != OBSERVED for version in versions] or ones > 0,
            "behavior_logprobs": -ones, "proximal_logprobs": -ones, "policy_logprobs": -2 * ones,
            "ref_logprobs": None, "importance_weight": ones * 0.5 ** (i % 5), "behavior_weight": None,
            "advantages": ones,
        }  # fmt: skip
        rows.append(row)
    record.add(10, rows)
    record.close()


def test_the_timeline_draws_all_parts_in_order_and_says_what_it_leaves_out(tmp_path: Path) -> None:
    assert timeline.section(run_at(tmp_path)) == ""
    write_timeline(tmp_path, 12)
    page = timeline.section(run_at(tmp_path))
    assert "shown" not in page and "generator-2" in page and ">50%</td>" in page
    rows = timeline.read_spans(run_at(tmp_path))
    assert rows is not None and (np.diff(rows["start"]) >= 0).all()
    write_timeline(tmp_path / "long", 30_000)
    page = timeline.section(run_at(tmp_path / "long"))
    assert "1,500 of 30,000 spans shown" in page and len(page) < 400_000
    write_timeline(tmp_path / "wide", 4000, parts=100)
    assert "32 of 100 parts shown" in timeline.section(run_at(tmp_path / "wide"))


def embedded(page: str) -> dict[str, Any]:
    (found,) = re.findall(r"<script type='application/json'>(.*?)</script>", page, re.DOTALL)
    data: dict[str, Any] = json.loads(found)
    return data


def test_the_browser_holds_at_most_200_rollouts_and_the_bytes_it_may(tmp_path: Path) -> None:
    assert rollouts.section(run_at(tmp_path)) == ""
    write_tokens(tmp_path, 450)
    page = rollouts.section(run_at(tmp_path))
    data = embedded(page)
    assert len(data["rollouts"]) == 200 and data["recorded"] == 450
    ids = [row["i"] for row in data["rollouts"]]
    assert ids == sorted(ids) and np.diff(ids).max() <= 3, "spread over the run"
    for limit in (20_000, 28_000):
        small = rollouts.section(run_at(tmp_path), limit)
        assert len(small.encode()) <= limit and 10 < len(embedded(small)["rollouts"]) < 200
    write_tokens(tmp_path / "long", 2, text="x<" * 3000)
    data = embedded(rollouts.section(run_at(tmp_path / "long")))
    assert [(len(row["t"]), row["n"]) for row in data["rollouts"]] == [(2000, 6000)] * 2
    assert len(rollouts.section(run_at(tmp_path / "long"), 100_000)) <= 100_000


def test_an_episode_shows_its_turns_and_observed_tokens_apart(tmp_path: Path) -> None:
    write_tokens(tmp_path, 2, text="ab??c", versions=(8, 9, OBSERVED, OBSERVED, 7))
    (tmp_path / "rollouts").mkdir()
    turns = Turn(0, 2, "g-0", ("<search>",), 1.25, 1), Turn(4, 5, "g-1", reward=0.5)
    row = RolloutRow(1, 1, "", "trained", 0.0, policy_versions=[8, 9, OBSERVED, OBSERVED, 7], turns=turns)
    row.forks, row.prompt_length = (Fork(2, 1), Fork(3, -1), Fork(4, 5)), 4
    write_part(tmp_path / "rollouts" / "part-00000.parquet", [row])
    page = rollouts.section(run_at(tmp_path))
    unknown, episode = embedded(page)["rollouts"]
    assert "e" not in unknown and [turn["v"] for turn in episode["e"]] == [[8, 9], [7, 7]]
    assert episode["a"] == 2 and episode["m"] == [] and episode["x"] == [0.5, 0.5, None, None, 0.5]
    assert episode["f"] == [[2, -3], [3, None], [4, 1]]
    if CHROMIUM is not None:
        body = shown(
            tmp_path,
            page,
            """<script>
const text = (name) => [...document.querySelectorAll(name)].map((e) => e.textContent);
const told = [text('.turn'), text('.seen'), text('.key span'), text('.fork')];
document.body.innerHTML = ''; document.body.append(JSON.stringify(told));</script>""",
        )
        told, seen, key, forks = json.loads(body)
        assert [text.removeprefix("a branch that follows ") for text in forks] == [
            "the prompt, but for its last 2 tokens", "nothing before it", "token 2",
        ]  # fmt: skip
        assert told[0] == "turn 1: g-0, versions 8 to 9, 2 tokens; <search>, 1.25 s, 1 failed"
        assert told[1] == "turn 2: g-1, versions 7 to 7, 1 tokens; no tool, reward 0.500"
        assert seen == ["?"] * 4 and "underlined: observed, not sampled" in key


def test_no_text_of_a_rollout_can_leave_its_place(tmp_path: Path) -> None:
    write_tokens(tmp_path, 3, text=HOSTILE.replace("\ud83d", "?"), prompt=HOSTILE)
    page = rollouts.section(run_at(tmp_path))
    assert page.count("</script>") == 2 and page.isascii()
    row = embedded(page)["rollouts"][0]
    assert row["p"] == HOSTILE.replace("\ud83d", "?") and "".join(row["t"]) == HOSTILE.replace("\ud83d", "?")


# Types into the fields as a user would, and notes what the page shows then.
ACT = """<script>
const seen = [], first = () => document.querySelector('.facts').textContent, note = document.querySelector('.count');
const set = (name, value) => { const e = document.querySelector(name); e.value = value;
  e.dispatchEvent(new Event('input', {bubbles: true})); };
const color = () => document.querySelector('.token').style.background;
seen.push(note.textContent, color());
set('.sort', 'r'); seen.push(first());
document.querySelector('.down').click(); seen.push(first());
set('.sort', 'w'); seen.push(first());
set('.color', 'v'); seen.push(color());
set('input[type=search]', 'NOTHING like it'); seen.push(note.textContent);
set('input[type=search]', '"QUOTED"'); seen.push(note.textContent);
document.querySelector('.more').click(); seen.push(String(document.querySelectorAll('.card').length));
document.body.innerHTML = ''; document.body.append(JSON.stringify([document.title, ...seen]));
</script>"""


def shown(folder: Path, section: str, act: str) -> str:
    """The text that the script ``act`` leaves in the page's body."""
    page = folder / "page.html"
    page.write_text(f"<title>t</title>{section}{act}")
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += [f"--user-data-dir={folder / 'profile'}", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    (found,) = re.findall(r"<body>(\[.*\])</body>", done.stdout)
    return html.unescape(str(found))


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: the rollout browser's script is not run")
def test_the_rollout_browser_searches_sorts_and_colours(tmp_path: Path) -> None:
    write_tokens(tmp_path, 45, text=HOSTILE.replace("\ud83d", "?"), prompt=HOSTILE)
    found = shown(tmp_path, rollouts.section(run_at(tmp_path)), ACT)
    title, count, by_weight, lowest, highest, heaviest, by_age, none, matching, cards = json.loads(found)
    assert title == "t", "a text of a rollout was run"
    assert count == "20 of 45 listed; 45 of 45 recorded rollouts shown in this page."
    assert lowest.startswith("reward 0.000") and highest.startswith("reward 44.000")
    assert "mean weight 1.000" in heaviest and by_weight != by_age and "rgb" in by_weight
    assert none.startswith("0 of 0 that match") and matching.startswith("20 of 45 that match") and cards == "40"
