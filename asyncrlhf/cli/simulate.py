"""``asyncrlhf simulate``: simulates a run on the virtual clock with the costs of a run or a profile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from asyncrlhf.cli.parser import Parser, law_of
from asyncrlhf.validation import typed_path

ROWS = (
    ("step_seconds", "seconds per step", "{:.4f}"),
    ("learner_idle", "learner idle", "{:.2f}"),
    ("generator_idle", "generators idle", "{:.2f}"),
    ("staleness", "staleness", "{:.2f}"),
    ("dropped_share", "dropped of trained", "{:.3f}"),
)


def simulate(arguments: Sequence[str]) -> int:
    parser = Parser("simulate", "Predicts a run on the virtual clock.")
    parser.add_argument("--from", dest="run", type=typed_path, metavar="RUN", help="a run with config, costs, lengths")
    parser.add_argument("--profile", type=typed_path, help="costs and lengths of `asyncrlhf profile`")
    parser.add_argument("--out", type=typed_path, help="folder of the simulated run's records")
    parser.add_lengths()
    parser.add_argument("--cohort", type=int, default=1, help="equal replicas that each simulated one represents")
    options, overrides = parser.parse_known_args(list(arguments))
    if (options.run is None) == (options.profile is None):
        parser.error("give one of --from and --profile")
    parser.check_least(options, mean_length=1, cv=0, cohort=1)
    from asyncrlhf.simulator.simulate import simulate_given  # seconds that a wrong word need not cost

    summary, measured = simulate_given(
        options.run, options.profile, overrides, law=law_of(options), cohort=options.cohort, out=options.out
    )
    _show(summary, measured)
    return 0


def _show(summary: dict[str, Any], measured: dict[str, float] | None) -> None:
    names = ["simulated", "measured"] if measured else ["simulated"]
    table = Table(
        "", *(Column(name, justify="right") for name in names), title=f"{summary['steps']} steps on the virtual clock"
    )
    for key, name, form in ROWS:
        cells = [form.format(summary["figures"][key]), *([form.format(measured[key])] if measured else [])]
        table.add_row(name, *cells)
    Console().print(table)
    cost = summary["controller_ms_per_rollout"]
    trained = summary["ledger"]["trained"]
    load = cost / 1e3 * trained / summary["wall_seconds"] if summary["wall_seconds"] else 0.0
    print(f"The controller took {cost:.2f} ms of this machine per rollout: {load:.0%} of one core at this rate.")
    if load > 0.5:
        print("One controller cannot keep up: use fewer, larger replicas, or a faster core.")
    print(f"Run directory: {summary['run_dir']}")
