"""``asyncrlhf profile``: the costs of a run's parts on this machine, measured or from a run's records; their file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrlhf.cli.parser import Parser
from asyncrlhf.validation import check, typed_path


def profile(arguments: Sequence[str]) -> int:
    parser = Parser("profile", "Measures the costs of this machine and model.")
    parser.add_argument("--from", dest="run", type=typed_path, metavar="RUN", help="take the costs of a run's records")
    parser.add_argument("--seconds", type=float, default=120.0, help="time limit of the measurements, without start-up")
    parser.add_argument("--out", type=typed_path, help="file to write (profile.json, of a run RUN/profile.json)")
    options, overrides = parser.parse_known_args(list(arguments))
    if options.run is not None:
        more: dict[str, Any] = {}
        check(not overrides, f"profile --from takes no overrides such as {' '.join(overrides)}.")
        from asyncrlhf.simulator.given import fitted_costs  # seconds that a wrong word need not cost

        costs, made = fitted_costs(options.run)
        target = options.out or options.run / "profile.json"
    else:
        check(options.seconds > 0, f"profile: --seconds {options.seconds:g} is too small; allowed: above 0.")
        from asyncrlhf.simulator.measure import measured

        target = options.out or Path("profile.json")
        costs, made, more = measured(options.seconds, overrides)
    costs.save(target, made, **more)
    base, each, token = costs.decode_terms
    print(
        f"An iteration of a replica takes {1e3 * base:.2f} ms, {1e3 * each:.4f} ms a sequence in it and "
        f"{1e9 * token:.3g} ms a million tokens of context."
    )
    print(f"A learner step takes {costs.train_terms[0]:.4f} s and {1e6 * costs.train_terms[1]:.2f} s a million tokens.")
    print(f"Publishing takes {1e3 * (costs.snapshot + costs.transfer + costs.load):.1f} ms.")
    print(f"Profile: {target}")
    return 0
