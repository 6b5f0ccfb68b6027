"""Colour, dash and mark of each configuration in a report, the same in every panel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncrlhf.report.load import Group, Run, group_runs
from asyncrlhf.sweeps.results import ONLY_METHOD, Cell, Results

# Okabe and Ito's palette, told apart also by colour-blind readers; a purple stands for their yellow, too pale on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#6A3D9A")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
MARKS = ("circle", "square", "diamond", "triangle-up", "x", "star", "cross", "triangle-down")
# As the legend shows them.
STROKES = dict(zip(DASHES, ("", "6 4", "2 3", "6 3 2 3", "11 4", "11 3 2 3"), strict=True))
GLYPHS = dict(zip(MARKS, "●■◆▲✖★✚▼", strict=True))


@dataclass(frozen=True)
class Series:
    """The look of one configuration. ``family``: its method in a sweep, whose settings share one colour; else empty.
    ``short``: its name within the family. ``marked``: it needs a mark because colour and dash are not unique."""

    label: str
    short: str
    family: str
    color: str
    dash: str
    mark: str
    marked: bool


def look(family: int, member: int = 0, members: int = 1) -> tuple[str, str, str]:
    """(colour, dash, mark) of the member of a family; ``members``: the size of the largest family. Eight families
    differ by colour; further ones, and members, by dash and mark. All of 192 looks are distinct."""
    number = member + family // len(COLORS) * members
    return COLORS[family % len(COLORS)], DASHES[number % len(DASHES)], MARKS[number % len(MARKS)]


def build_series(groups: Sequence[Group], families: Sequence[str]) -> list[Series]:
    """One series per group. ``families`` names the family of each; an empty name makes the group its own family."""
    names = [family or f"\0{number}" for number, family in enumerate(families)]
    order = list(dict.fromkeys(names))
    most = max((names.count(name) for name in order), default=1)
    found = []
    for number, group in enumerate(groups):
        member = names[:number].count(names[number])
        color, dash, mark = look(order.index(names[number]), member, most)
        label = group.label if len(group.runs) == 1 else f"{group.label} ({len(group.runs)} runs)"
        short = group.label.removeprefix(f"{families[number]}, ") if families[number] else label
        found.append(Series(label, short, families[number], color, dash, mark, dash != DASHES[0]))
    return found


def group_all(runs: Sequence[Run], sweeps: Sequence[Results]) -> tuple[list[Group], list[str]]:
    """The groups of a page and the family of each: a sweep's configurations as in its table, then the other runs."""
    by_path = {run.path.resolve(): run for run in runs}
    groups: list[Group] = []
    families: list[str] = []
    for found in sweeps:
        for cell in found.cells:
            members = tuple(
                run for point in cell.points if (run := by_path.pop(point.path.resolve(), None)) is not None
            )
            if members:
                family, label = _names(found, cell, several=len(sweeps) > 1)
                groups.append(Group(label, members))
                families.append(family)
    others = group_runs([run for run in runs if run.path.resolve() in by_path]) if by_path else []
    return [*groups, *others], families + [""] * len(others)


def _names(found: Results, cell: Cell, several: bool) -> tuple[str, str]:
    """(family, label) of a sweep's configuration."""
    twice = any(c.method == cell.method and c.setting == cell.setting and c is not cell for c in found.cells)
    setting = f"{cell.setting}, alone" if twice and cell.exclusive else cell.setting
    methods = len(found.methods) > 1
    family = ", ".join(part for part in (found.name * several, cell.method * methods) if part)
    if not family:
        return "", setting if cell.method == ONLY_METHOD else f"{cell.method}, {setting}"
    return family, f"{family}, {setting}"
