"""One simulated run from the costs of a run or a profile, as ``asyncrlhf simulate`` asks for it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from asyncrlhf.config.compose import load_config
from asyncrlhf.errors import ConfigError
from asyncrlhf.records.write.recorder import METRICS_FILE, read_metrics
from asyncrlhf.simulator.given import (
    changed,
    config_of_run,
    fitted_costs,
    read_profile,
    settings_of_run,
    sharing,
    workload_of,
)


def simulate_given(
    options: argparse.Namespace, overrides: Sequence[str]
) -> tuple[dict[str, Any], dict[str, float] | None]:
    """The simulated run's summary with its figures, and those of the real run if no setting was changed."""
    from asyncrlhf.actors.where import available_cores
    from asyncrlhf.orchestrator.run import new_run_dir
    from asyncrlhf.planner.fit import hiccups_of_run
    from asyncrlhf.planner.shapes import Workload
    from asyncrlhf.simulator.cost_world import Conditions
    from asyncrlhf.simulator.simulate import OVERRIDES, figures, in_cohorts, simulate

    hiccups, interference, lengths, shared = (0.0, 0.0), (1.0, 1.0), None, dict[str, Any]()
    try:
        if options.run is not None:
            costs, _ = fitted_costs(options.run)
            config = config_of_run(options.run, overrides)
            shared = sharing(changed(settings_of_run(options.run, overrides)), costs, len(available_cores()))
            lengths, hiccups = workload_of(options.run), hiccups_of_run(options.run)
        else:
            config = load_config([*overrides, *OVERRIDES])
            costs, lengths, interference = read_profile(options.profile, config)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if options.mean_length is not None:
        lengths = Workload(0.0, options.mean_length, options.cv, config.generator.max_completion_length)
    if lengths is None:
        raise ConfigError("simulate: a profile holds no response lengths; give --mean-length TOKENS (and --cv).")
    conditions = Conditions(
        failures=options.failures,
        hiccups=hiccups[0],
        hiccup_seconds=hiccups[1],
        interference=interference,
        cohort=options.cohort,
        **shared,
    )
    folder = options.out or new_run_dir(f"simulated-{config.name}")
    summary = simulate(in_cohorts(config, options.cohort), costs, lengths, folder, conditions)
    found = figures(read_metrics(folder / METRICS_FILE), config.async_.bound)
    measured = None
    if options.run is not None and not overrides:
        measured = figures(read_metrics(options.run / METRICS_FILE), config.async_.bound)
    return {**summary, "run_dir": str(folder), "figures": found}, measured
