"""Draws the templates of docs/systems.md: ``python docs/images/draw_systems.py`` writes systems_*.svg beside itself."""

from __future__ import annotations

from pathlib import Path

from draw import box, picture, text

HERE = Path(__file__).parent
UNIT, LANE = 52, 28
Lane = tuple[str, list[tuple[float, float, int, str]]]  # name; start, length, version, words


def part(x: float, y: float, width: float, title: str, below: str) -> list[str]:
    shape = (
        f'<rect x="{x}" y="{y}" width="{width}" height="46" rx="4" fill="#fff" stroke="#4e79a7" stroke-width="1.5"/>'
    )
    middle = x + width / 2
    return [shape, text(middle, y + 20, title, 13, "middle"), text(middle, y + 37, below, 11, "middle", "#666")]


def devices(x: float, y: float, width: float, height: float, title: str) -> list[str]:
    shape = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="#eef3f8" stroke="#9db4cc"/>'
    return [shape, text(x + 8, y + 15, title, 11, fill="#46627f")]


def arrow(x: float, y: float, to_x: float, to_y: float, words: str = "", dashed: bool = False) -> list[str]:
    dash = ' stroke-dasharray="5 3"' if dashed else ""
    line = f'<path d="M{x} {y} L{to_x} {to_y}" stroke="#333" stroke-width="1.3" marker-end="url(#tip)"{dash}/>'
    return [line, *([text((x + to_x) / 2, min(y, to_y) - 5, words, 10, "middle", "#333")] if words else [])]


TIP = (
    '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="3" orient="auto">'
    '<path d="M0 0 L7 3 L0 6 z" fill="#333"/></marker></defs>'
)


def publish(y: float, words: str) -> list[str]:
    """From the learner back to the generators, under all parts."""
    path = f'<path d="M640 {y} L640 {y + 24} L125 {y + 24} L125 {y + 3}" fill="none" stroke="#333" stroke-width="1.3"'
    return [f'{path} marker-end="url(#tip)" stroke-dasharray="5 3"/>', text(385, y + 19, words, 11, "middle")]


def drawing(shared: bool, labels: tuple[str, str], weights: str, lanes: list[Lane]) -> str:
    """Parts on their devices above, what they do over some steps below. ``labels``: on the arrows between parts."""
    parts = [TIP]
    if shared:
        parts += devices(20, 12, 720, 84, "one set of devices: the parts take turns on all of them")
    else:
        for x, width, title in ((20, 210, "devices 1"), (275, 210, "devices 2"), (530, 210, "devices 3")):
            parts += devices(x, 12, width, 84, title)
    for x, title, below in (
        (35, "generators", "sample responses"),
        (290, "reward model", "scores them"),
        (545, "learner", "trains the policy"),
    ):
        parts += part(x, 36, 180, title, below)
    parts += arrow(215, 59, 288, 59, labels[0]) + arrow(470, 59, 543, 59, labels[1])
    parts += publish(96, weights)
    y = 146
    for name, boxes in lanes:
        parts.append(text(20, y + 17, name, 11))
        parts += [box(110 + start * UNIT, y, length * UNIT, version, words) for start, length, version, words in boxes]
        y += LANE + 4
    parts.append(text(20, y + 16, "A colour is the policy version that sampled the data; time goes to the right.", 12))
    return picture(760, y + 30, parts)


def colocated() -> str:
    steps = range(3)
    lanes: list[Lane] = [
        ("generators", [(4 * i, 2.4, i, f"v{i}") for i in steps]),
        ("reward model", [(4 * i + 2.4, 0.6, i, f"v{i}") for i in steps]),
        ("learner", [(4 * i + 3, 1, i, f"v{i}") for i in steps]),
    ]
    return drawing(True, ("batch", "batch"), "weights: on the same devices, in another layout", lanes)


def disaggregated() -> str:
    """In step: each set of devices waits while another works."""
    lanes: list[Lane] = [
        ("generators", [(6 * i, 3.2, i, f"v{i}") for i in range(2)]),
        ("reward model", [(6 * i + 3.2, 1, i, f"v{i}") for i in range(2)]),
        ("learner", [(6 * i + 4.2, 1.8, i, f"v{i}") for i in range(2)]),
    ]
    return drawing(False, ("batch", "batch"), "weights: over the network, then the next batch begins", lanes)


def off_policy() -> str:
    ends = [2.4 * (i + 1) for i in range(5)]
    versions = [0, 0, 1, 2, 3]
    lanes: list[Lane] = [
        ("generators", [(2.4 * i, 2.4, v, f"v{v}") for i, v in enumerate(versions)]),
        ("reward model", [(end - 1.9, 2.1, v, f"v{v}") for end, v in zip(ends[:4], versions, strict=False)]),
        ("learner", [(end + 0.2, 2.1, v, f"v{v}") for end, v in zip(ends[:4], versions, strict=False)]),
    ]
    return drawing(False, ("rollouts", "buffer"), "weights: between two tokens, while all go on", lanes)


def fused() -> str:
    lanes: list[Lane] = [("generators", []), ("reward model", []), ("learner", [])]
    for step in range(2):
        at = 5.4 * step
        lanes[0][1].append((at, 3.2, step, f"v{step}"))
        lanes[1][1].extend((at + 0.5 + 0.7 * i, 0.7, step, "chunk") for i in range(4))
        lanes[1][1].append((at + 3.3, 0.35, step, ""))
        lanes[2][1].append((at + 3.65, 1.7, step, f"v{step}"))
    return drawing(False, ("chunks", "batch"), "weights: over the network, then the next batch begins", lanes)


if __name__ == "__main__":
    for name, draw in (
        ("colocated", colocated),
        ("disaggregated", disaggregated),
        ("off_policy", off_policy),
        ("fused", fused),
    ):
        (HERE / f"systems_{name}.svg").write_text(draw())
