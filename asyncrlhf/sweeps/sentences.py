"""The results of a sweep in sentences and as ``results.json``."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrlhf.records.show.summary import counted
from asyncrlhf.records.write.whole_files import write_atomically
from asyncrlhf.sweeps.results import FRESH, ONLY_METHOD, Cell, Estimate, Results, paired

RESULTS_FILE = "results.json"
ESTIMATES = ("quality", "staleness", "seconds", "kept", "speedup")
LISTED = 8  # configurations in a sentence; the table has all
CLEAR = 2.0  # standard errors beyond which a loss is called one
PAIR = "alternated pair"  # two timed jobs of one seed


def sentences(results: Results) -> list[str]:
    """For the terminal and the head of the report: first the sentence that joins quality and speed, then the others."""
    quality = [cell for cell in results.cells if not cell.exclusive]
    quality = quality if len(quality) > 1 else list(results.cells)
    said = [results.search] if results.search else []
    told: list[Cell] = []
    for method in results.methods:
        joined = join(results, method)
        if joined:
            said.append(_headline(joined, quality, results))
            told += [speed for _, speed in joined]
    said += filter(None, (_kept(quality, results.what, s) for s in dict.fromkeys(c.setting for c in quality)))
    said += filter(None, [_compression(quality, results.what)])
    if quality and not results.search:
        said.append(_ranking(quality, results.what))
    timed = [cell for cell in results.cells if cell.speedup is not None]
    said += [_speed(cell) for cell in timed if cell not in told]
    alone = [cell for cell in results.cells if cell.exclusive]
    if not timed:
        said.append(
            _fastest(alone)
            if len(alone) > 1
            else "No speed is reported: no two jobs ran on Ray and alone on the machine (sweep.timing=exclusive)."
        )
    if results.left_out:
        names = ", ".join(f"{name} ({state})" for name, state in results.left_out.items())
        said.append(f"Without {len(results.left_out)} of the jobs: {names}.")
    return said


def join(results: Results, method: str) -> list[tuple[Cell, Cell]]:
    """(quality, speed) of each bound for which the method has both, the lowest first. Quality is that of the exact lag
    (``fixed_lag``), or of the timed jobs themselves if no job ran for quality alone."""
    own = [cell for cell in results.cells if cell.method == method and cell.bound is not None]
    timed = [cell for cell in own if cell.speedup is not None]
    lags = {cell.bound: cell for cell in own if cell.points[0].mode == "fixed_lag" and not cell.exclusive}
    apart = any(not cell.exclusive for cell in results.cells)
    pairs = [(lags.get(speed.bound) if apart else speed, speed) for speed in timed]
    found = [(quality, speed) for quality, speed in pairs if quality is not None and quality.kept is not None]
    return sorted(found, key=lambda pair: pair[0].staleness.mean)


def _headline(joined: Sequence[tuple[Cell, Cell]], quality: Sequence[Cell], results: Results) -> str:
    """``lag 4 with tis keeps 99 ± 2% of the reward at 1.6 ± 0.1 times the speed of sync; at lag 16 it loses ...``"""
    first = joined[0][0]
    of_method = "" if first.method == ONLY_METHOD else f" with {first.method}"
    parts = []
    for cell, speed in joined:
        assert speed.speedup is not None
        whole = cell is first
        words = f"{_place(cell)}{of_method if whole else ''} {_share(cell)}{f' of the {results.what}' if whole else ''}"
        parts.append(f"{words} at {speed.speedup.text(digits=2)} times the speed{' of sync' if whole else ''}")
    stale = max(
        (c for c in quality if c.method == first.method and c.kept), key=lambda c: c.staleness.mean, default=first
    )
    if all(stale is not cell for cell, _ in joined):
        parts.append(f"at {_place(stale)} it {_share(stale)}")
    peers = [c for c in quality if c.setting == stale.setting and c.method != stale.method and c.kept is not None]
    if peers:
        parts[-1] += f", where {', '.join(f'{cell.method} {_share(cell)}' for cell in peers)}"
    pairs = min(speed.speedup.count for _, speed in joined if speed.speedup is not None)
    seeds = min(cell.kept.count for cell, _ in joined if cell.kept is not None)
    return (
        f"{'; '.join(parts)} (quality: {counted(seeds, 'seed')}; speed: async at that bound, "
        f"{counted(pairs, PAIR)}, each alone on the machine)."
    )


def _place(cell: Cell) -> str:
    return f"{cell.setting} (staleness {cell.staleness.mean:.1f})"


def _share(cell: Cell) -> str:
    """``keeps 99 ± 2%``, or ``loses 12 ± 3%`` if the loss is beyond chance (``CLEAR``)."""
    kept = cell.kept
    assert kept is not None
    if not math.isnan(kept.error) and 1 - kept.mean > CLEAR * kept.error:
        return f"loses {Estimate(1 - kept.mean, kept.error, kept.count).text(100, 0, '%')}"
    return f"keeps {kept.text(100, 0, '%')}"


def _kept(quality: Sequence[Cell], what: str, setting: str) -> str:
    """One setting's sentence: which share of its own quality without staleness each method keeps, the best first."""
    found = [(cell, cell.kept) for cell in quality if cell.setting == setting and cell.kept is not None]
    if not found:
        return ""
    found.sort(key=lambda pair: -pair[1].mean)
    stale = Estimate.of([point.staleness for cell, _ in found for point in cell.points]).mean
    parts = [f"{cell.method} keeps {kept.text(100, 0, '%')}" for cell, kept in found]
    seeds = min(kept.count for _, kept in found)
    return (
        f"{setting} (staleness {stale:.1f}): {', '.join(parts)} of the {what} without staleness "
        f"({counted(seeds, 'seed')})."
    )


def _compression(cells: Sequence[Cell], what: str) -> str:
    """What a smaller cache costs, beside what staleness costs and what a correction brings back with such a cache: each
    against the configuration that differs in this alone. Empty if no two differ in their cache."""
    costs, stale, back, seeds = list[str](), list[str](), list[str](), list[int]()

    def add(found: list[str], more: Cell, less: Cell, *words: str) -> None:
        lost = difference(more, less)
        seeds.append(lost.count)
        found.append(" ".join([lost.text(), *filter(None, words)]))

    for cell in sorted(cells, key=lambda cell: -cell.room):
        own, learner = cell.points[0], cell.points[0].learner
        peers = [(other, other.points[0]) for other in cells]
        large = max((c for c, p in peers if (p.learner, c.setting) == (learner, cell.setting)), key=lambda c: c.room)
        fresh = min((c for c, p in peers if c.method == cell.method), key=lambda c: c.staleness.mean)
        plain = [c for c, p in peers if (p.cache, c.setting) == (own.cache, cell.setting) and not p.corrected]
        by = learner and f"under {learner}"
        if cell.room < large.room:
            add(costs, large, cell, f"with {own.cache} ({cell.room:.0%} kept)", by, f"at {cell.setting}")
            if own.corrected and plain:
                add(back, cell, plain[0], f"by {learner} with {own.cache} at {cell.setting}")
        if fresh.staleness.mean <= FRESH < cell.staleness.mean:
            add(stale, fresh, cell, f"at {cell.setting}", by, f"with {own.cache or 'the whole cache'}")
    named = {"a smaller cache costs": costs, "staleness costs": stale, "a correction brings back": back}
    parts = [f"{name} {', '.join(found[:LISTED])}" for name, found in named.items() if found]
    return f"Of the {what}, {'; '.join(parts)} ({counted(min(seeds), 'common seed')})." if costs else ""


def _speed(cell: Cell) -> str:
    assert cell.speedup is not None
    of_method = "" if cell.method == ONLY_METHOD else f" ({cell.method})"
    return (
        f"{cell.setting}{of_method} trains the same steps at {cell.speedup.text(digits=2)} times the speed of "
        f"sync ({counted(cell.speedup.count, PAIR)}, each alone on the machine)."
    )


def _ranking(cells: Sequence[Cell], what: str) -> str:
    """Every configuration's quality, the best first, and the lead of the best over the next."""
    best, *others = sorted(cells, key=lambda cell: -cell.quality.mean)
    if not others:
        return f"{_name(best, cells)}: {what} {best.quality.text()} ({counted(best.quality.count, 'seed')})."
    listed = [f"{_name(cell, cells)} {cell.quality.text()}" for cell in [best, *others][:LISTED]]
    more = f", and {len(cells) - LISTED} more" if len(cells) > LISTED else ""
    lead, next_name = difference(best, others[0]), _name(others[0], cells)
    seeds = counted(lead.count, "common seed")
    if math.isnan(lead.error):
        clear = f"its lead of {lead.text()} over {next_name} has no standard error ({seeds}), so that it may be chance"
    elif lead.mean > CLEAR * lead.error:
        clear = f"it leads {next_name} by {lead.text()} ({seeds}), more than two standard errors"
    else:
        clear = f"its lead of {lead.text()} over {next_name} ({seeds}) may be chance: it is under two standard errors"
    return f"{what.capitalize()}, the best first: {', '.join(listed)}{more}. The best is {_name(best, cells)}; {clear}."


def _fastest(cells: Sequence[Cell]) -> str:
    """The training time of configurations that ran alone, without one in sync mode to compare with."""
    best, second, *_ = ordered = sorted(cells, key=lambda cell: cell.seconds.mean)
    listed = [f"{_name(cell, cells)} {cell.seconds.text(digits=1)} s" for cell in ordered[:LISTED]]
    more = f", and {len(cells) - LISTED} more" if len(cells) > LISTED else ""
    pairs = paired(best, second, lambda point: point.train_seconds)
    share = Estimate.of([own / other for other, own in pairs]) if pairs else None
    needs = f"needs {share.text(100, 0, '%')} of the time of" if share else "has no seed in common with"
    ran = f" ({counted(share.count, PAIR)}, each alone on the machine)" if share else ""
    return (
        f"Training time, the fastest first: {', '.join(listed)}{more}. {_name(best, cells)} {needs} "
        f"{_name(second, cells)}{ran}. Speed relative to sync is not reported: no job with async.mode=sync ran alone."
    )


def difference(cell: Cell, base: Cell) -> Estimate:
    """The cell's mean quality minus the base's, by the seeds that both have; by all seeds, without a standard error, if
    they have none in common."""
    pairs = paired(cell, base, lambda point: point.quality)
    if pairs:
        return Estimate.of([own - other for other, own in pairs])
    return Estimate(cell.quality.mean - base.quality.mean, math.nan, 0)


def _name(cell: Cell, cells: Sequence[Cell]) -> str:
    """The cell in words, among others: what differs between them."""
    settings, methods = ({getattr(c, what) for c in cells} for what in ("setting", "method"))
    if len(methods) == 1:
        return cell.setting
    return cell.method if len(settings) == 1 else f"{cell.setting} with {cell.method}"


def figures(cell: Cell) -> dict[str, Any]:
    """A configuration as one row: means over the seeds and their standard errors, NaN if missing."""
    row = {"method": cell.method, "setting": cell.setting, "alone": cell.exclusive, "seeds": len(cell.points)}
    for name in ESTIMATES:
        found = getattr(cell, name)
        row |= {name: found.mean if found else math.nan, f"{name}_error": found.error if found else math.nan}
    return row


def write_results(results: Results, folder: Path) -> None:
    """``results.json``: the sentences and all their numbers, with the run directories behind them."""
    runs = [[str(point.path.relative_to(folder)) for point in cell.points] for cell in results.cells]
    cells = [{**figures(cell), "runs": own} for cell, own in zip(results.cells, runs, strict=True)]
    document = {
        "name": results.name,
        "quality": results.what,
        "sentences": sentences(results),
        "configurations": [{key: _finite(value) for key, value in row.items()} for row in cells],
        "left_out": results.left_out,
    }
    write_atomically(folder / RESULTS_FILE, json.dumps(document, indent=1, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
