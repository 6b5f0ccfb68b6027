"""``asyncrlhf sweep``: a grid of runs, and one report of their common results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from asyncrlhf.cli.first_look import first_look
from asyncrlhf.config.run_config import RunConfig
from asyncrlhf.last_words import by_signal
from asyncrlhf.sweeps.plan import SweepPlan, plan_sweep
from asyncrlhf.sweeps.record import SweepRecord, owned

ACCEPT, LIST = "--accept-changed", "--list"
HELP = """asyncrlhf sweep [overrides]: every combination of the choices, seed by seed, and one report

  asyncrlhf sweep experiment=staleness_quick                       a sweep that comes with asyncrlhf
  asyncrlhf sweep async=fixed_lag async.lag=0,1,4 seeds=3          choices as in Hydra: a,b  range(0,4)  glob(*)
  asyncrlhf sweep experiment=staleness_quick --list                names the jobs and runs none

  seeds=N                  seeds 0 to N-1 of every configuration (sweep.seeds)
  sweep.name=NAME          the folder is runs/sweeps/NAME-<hash of the jobs>
  sweep.timing=exclusive   one job at a time; only then is speed reported
  sweep.jobs=N             at most N jobs side by side
  sweep.search=optuna      Optuna chooses sweep.trials=20 of the combinations, interval(a,b) and tag(log,interval(a,b))
                           among them, after sweep.objective=heldout_accuracy
  --accept-changed         continue although code or data have changed since the finished jobs

The same command continues an interrupted sweep: finished jobs are not run again.
Exit codes: 0 all jobs done, 1 a job failed, 2 wrong config or input, 130 interrupted, 128 + N ended by signal N."""
RUNS = Path("runs")


def main(arguments: Sequence[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(HELP)
        return 0
    rest = [argument for argument in arguments if argument not in (ACCEPT, LIST)]
    plan = plan_sweep(rest)
    if LIST in arguments:
        axes = [axis.plain() for axis in plan.search.axes] if plan.search is not None else []
        print("\n".join([*axes, *(job.name for job in plan.jobs), *(f"left out: {words}" for words in plan.left_out)]))
        return 0
    with owned(RUNS / "sweeps" / plan.folder_name):
        return run_plan(plan, accept_changed=ACCEPT in arguments)


def run_plan(plan: SweepPlan, accept_changed: bool) -> int:
    """Run the unfinished jobs of the sweep, whose folder the caller holds; returns the exit code."""
    from asyncrlhf.sweeps.run import Sweeper, open_sweep
    from asyncrlhf.sweeps.table import SweepTable

    for config in {_input(config): config for config in plan.configs}.values():
        first_look(config)
    record = open_sweep(plan, RUNS, accept_changed)
    done = sum(job.state == "done" for job in record.jobs.values())
    console = Console()
    finished = f", {done} of them done before" if done else ""
    console.print(f"Sweep of {plan.total} jobs{finished}: {record.folder}", markup=False, highlight=False)
    for words in plan.left_out:
        console.print(f"Left out: {words}", markup=False, highlight=False, soft_wrap=True)
    table = SweepTable(plan.total, done, console)
    code = 0
    try:
        Sweeper(plan, record, table).run()
    except KeyboardInterrupt:
        code = by_signal()
    finally:
        table.stop()
    states = Counter(job.state for job in record.jobs.values())
    for line in _closing(record, states):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return code or (1 if states["failed"] or states["interrupted"] else 0)


def _input(config: RunConfig) -> str:
    """What ``first_look`` reads of the config: many jobs have the same."""
    return repr((config.task, config.model.path, config.reward, config.algorithm.loss.target))


def _closing(record: SweepRecord, states: Counter[str]) -> list[str]:
    lines = [f"Jobs: {', '.join(f'{count} {state}' for state, count in states.items())}."]
    for job in record.jobs.values():
        if job.state in ("failed", "interrupted") and job.note:
            lines.append(f"{job.name} {job.state}: {job.note} (see {record.folder / job.folder}/output.log)")
    if not states["done"]:
        return lines
    from asyncrlhf.cli.one_run import draw
    from asyncrlhf.sweeps.results import read_results
    from asyncrlhf.sweeps.sentences import sentences, write_results

    results = read_results(record.folder)
    write_results(results, record.folder)
    return [*lines, *sentences(results), *_to_sync(record.folder), draw([record.folder])]


def _to_sync(folder: Path) -> list[str]:
    """The command that uploads the runs that W&B recorded offline; empty if there are none."""
    parts = "jobs/*/wandb/offline-run-*"
    return [f"W&B, one group: wandb sync {folder}/{parts}"] if any(folder.glob(parts)) else []
