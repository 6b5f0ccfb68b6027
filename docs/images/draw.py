"""Draws the pictures of docs/staleness.md: ``python docs/images/draw.py`` writes modes.svg and corrections.svg."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#76b7b2")  # by the version that sampled
LANE, UNIT = 24, 62
Boxes = tuple[float, float, int]  # start, length, version


def text(x: float, y: float, words: str, size: int = 13, anchor: str = "start", fill: str = "#333") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{fill}">{words}</text>'


def box(x: float, y: float, width: float, version: int, words: str) -> str:
    colour = COLOURS[version % len(COLOURS)]
    shape = f'<rect x="{x:.1f}" y="{y}" width="{width - 3:.1f}" height="{LANE}" rx="3" fill="{colour}"/>'
    return shape + text(x + width / 2 - 1.5, y + 16, words, 11, "middle", "#fff")


def picture(width: int, height: int, parts: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="#fff"/>', *parts, "</svg>"]) + "\n"


def free_running(bound: int, seconds: float) -> tuple[list[Boxes], list[Boxes]]:
    """Generators that take ``seconds`` a batch and a learner that takes 1, under the gate's rule: the n-th batch begins
    once the version is at least n - bound."""
    generated: list[Boxes] = []
    trained: list[Boxes] = []
    ends: list[float] = []  # of the learner's steps; the version is how many lie behind
    free = 0.0
    for number in range(12):
        start = max(free, ends[number - bound - 1] if number > bound else 0.0)
        generated.append((start, seconds, sum(end <= start for end in ends)))
        free = start + seconds
        begun = max(free, ends[-1] if ends else 0.0)
        trained.append((begun, 1, generated[-1][2]))
        ends.append(begun + 1)
    return generated, trained


def modes() -> str:
    """Two lanes a mode: what the generators sample, by version, and which of it the learner trains."""
    # (title, what is generated, what is trained)
    rows = [
        ("sync: staleness 0", [(2 * i, 1, i) for i in range(5)], [(2 * i + 1, 1, i) for i in range(5)]),
        ("one_step: 1", [(i, 1, max(0, i - 1)) for i in range(9)], [(i + 1, 1, max(0, i - 1)) for i in range(9)]),
        ("async, max_staleness=2: at most 2", *free_running(bound=2, seconds=0.8)),
        (
            "fixed_lag, lag=3: 3",
            [(i, 1, max(0, i - 3)) for i in range(9)],
            [(i + 1, 1, max(0, i - 3)) for i in range(9)],
        ),
    ]
    parts, y = [], 14
    for title, generated, trained in rows:
        parts.append(text(10, y + 10, title, 14))
        for lane, (name, boxes) in enumerate((("generators", generated), ("learner", trained))):
            top = y + 20 + lane * (LANE + 4)
            parts.append(text(10, top + 16, name, 11))
            parts += [box(90 + s * UNIT, top, n * UNIT, v, f"v{v}") for s, n, v in boxes if s + n <= 10]
        y += 2 * LANE + 48
    parts.append(text(10, y + 6, "A colour is the policy version that sampled the data; time goes to the right.", 12))
    return picture(730, y + 20, parts)


def corrections() -> str:
    """What each correction makes of the weight prox / mu."""
    left, top, width, height = 60, 30, 560, 240

    def at(ratio: float, weight: float) -> str:
        return f"{left + ratio / 8 * width:.1f},{top + height - weight / 6 * height:.1f}"

    curves = {
        "none: 1": ([(0, 1), (8, 1)], "#e15759"),
        "truncate at 2 (tis)": ([(0, 0), (2, 2), (8, 2)], "#4e79a7"),
        "mask above 5 (decoupled_grpo)": ([(0, 0), (5, 5), (5, 0), (8, 0)], "#59a14f"),
        "mask outside 0.5 to 5 (icepop)": ([(0, 0), (0.5, 0), (0.5, 0.5), (5, 5), (5, 0), (8, 0)], "#f28e2b"),
    }
    axes = f'<path d="M{at(0, 6)} L{at(0, 0)} L{at(8, 0)}" fill="none" stroke="#333"/>'
    parts = [axes]
    parts += [text(left + i / 8 * width, top + height + 18, str(i), 11, "middle") for i in range(9)]
    parts += [text(left - 8, top + height - i / 6 * height + 4, str(i), 11, "end") for i in range(7)]
    for number, (name, (points, colour)) in enumerate(curves.items()):
        dash = ("", "6 3", "", "2 3")[number]
        line = " L".join(at(*point) for point in points)
        parts.append(f'<path d="M{line}" fill="none" stroke="{colour}" stroke-width="2.5" stroke-dasharray="{dash}"/>')
        parts.append(text(left + 20, top + 14 + 18 * number, name, 12, fill=colour))
    parts.append(text(left + width / 2, top + height + 38, "ratio prox / mu of a token", 12, "middle"))
    parts.append(text(left - 40, top - 12, "weight of its gradient", 12))
    return picture(660, 330, parts)


if __name__ == "__main__":
    (HERE / "modes.svg").write_text(modes())
    (HERE / "corrections.svg").write_text(corrections())
