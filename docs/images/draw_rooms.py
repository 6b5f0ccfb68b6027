"""Draws the floor plan of docs/architecture.md: ``python docs/images/draw_rooms.py`` writes floor_plan.svg."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent
# By floor, from the top: (room, what it holds, its inner rooms). tests/test_docs.py compares them with the folders.
FLOORS: tuple[tuple[int, tuple[tuple[str, str, str], ...]], ...] = (
    (12, (("api", "train, evaluate, sweep, load_runs", ""),)),
    (11, (("cli", "commands", ""), ("doctor", "probes", ""), ("simulator", "predicted runs", ""),
          ("report", "curves, HTML", ""), ("bench", "ratios", ""))),
    (10, (("stages", "SFT, reward models, evaluation", ""), ("sweeps", "grids and searches of runs", ""))),
    (9, (("orchestrator", "the loops of a run", "rollouts replicas learning recording start"),)),
    (8, (("cluster", "hosts of the parts: Ray or one process", ""),)),
    (7, (("actors", "thin Ray actors", ""), ("records", "a run's directory", "write read show"))),
    (6, (("config", "the root of the settings", ""), ("readahead", "reading before the end", ""))),
    (5, (("buffer", "admission, replay buffer, ledger", ""),)),
    (4, (("transport", "weights to the generators", "collective"),)),
    (3, (("engines", "sampling", "hf vllm"), ("episodes", "many turns", "adapters agents"),
         ("learner", "training", "settings step model attention updates state"))),
    (2, (("data", "prompts, packing", ""), ("models", "checkpoints", ""), ("rewards", "scores", ""),
         ("tasks", "built-in tasks", ""))),
    (1, (("algorithms", "the formulas: tensors and floats only", ""),)),
    (0, (("types, errors, validation, ...", "the data passed between parts, and refusals", ""),)),
)  # fmt: skip
BESIDE = ("formulas for", "seconds, bytes,", "staleness; beside", "the floors: only", "floor 11 uses it")
LEFT, RIGHT, ROOM, INNER, GAP = 58, 774, 44, 30, 8


def text(x: float, y: float, words: str, size: int, fill: str = "#556", more: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" fill="{fill}" {more}>{words}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, more: str = 'stroke="#6b7f99"') -> str:
    return f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" rx="4" fill="{fill}" {more}/>'


def draw_room(x: float, y: float, width: float, height: float, room: tuple[str, str, str]) -> list[str]:
    name, about, inner = room
    cells = inner.split()
    parts = [box(x, y, width, height, "#eef3fa" if cells else "#f7f7f4")]
    parts += [text(x + 10, y + 19, name, 14, "#1d2b3a", 'font-weight="bold"'), text(x + 10, y + 35, about, 11)]
    each = (width - 16) / max(1, len(cells))
    for place, cell in enumerate(cells):
        start = x + 10 + place * each
        parts.append(box(start, y + 42, each - 4, 24, "#fff", 'stroke="#9fb2cc"'))
        parts.append(text(start + each / 2 - 2, y + 58, cell, 11, "#1d2b3a", 'text-anchor="middle"'))
    return parts


def floor_plan() -> str:
    parts, y = [], 16.0
    for floor, rooms in FLOORS:
        height = ROOM + (INNER if any(inner for _, _, inner in rooms) else 0)
        shares = [1 + 0.55 * len(inner.split()) for _, _, inner in rooms]
        free, x = RIGHT - LEFT - 6 * (len(rooms) - 1), float(LEFT)
        parts.append(text(LEFT - 12, y + height / 2 + 5, str(floor), 12, "#888", 'text-anchor="end"'))
        for room, share in zip(rooms, shares, strict=True):
            width = free * share / sum(shares)
            parts += draw_room(x, y, width, height, room)
            x += width + 6
        y += height + GAP
    first, last = 16 + ROOM + GAP, y - ROOM - 2 * GAP
    parts.append(box(RIGHT + 20, first, 112, last - first, "#f7f7f4", 'stroke="#6b7f99" stroke-dasharray="5 3"'))
    parts.append(text(RIGHT + 30, first + 22, "planner", 14, "#1d2b3a", 'font-weight="bold"'))
    parts += [text(RIGHT + 30, first + 42 + 15 * line, words, 11) for line, words in enumerate(BESIDE)]
    turned = f'text-anchor="middle" transform="rotate(-90 18 {y / 2:.0f})"'
    parts += [text(18, y / 2, "imports point down", 11, "#c0392b", turned)]
    parts += [f'<path d="M24 24 V{y - 24:.0f} m-4 -6 l4 8 l4 -8" fill="none" stroke="#c0392b"/>']
    size = f'viewBox="0 0 {RIGHT + 146} {y + 8:.0f}" font-family="sans-serif"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}><title>The rooms of asyncrlhf by floor</title>'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    (HERE / "floor_plan.svg").write_text(floor_plan(), encoding="utf-8")
