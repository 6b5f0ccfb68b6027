"""The cases of chaos are runs that start: a case with a refused setting would hold without a fault."""

from __future__ import annotations

import pytest

from asyncrlhf.config.compose import load_config
from tests.chaos.injection import SUITS, draw_case
from tests.chaos.moments import BUILDING, MOMENTS, SENT, moment_cases
from tests.chaos.run import true_cause


@pytest.mark.parametrize("runtime", ["ray", "local"])
def test_the_settings_of_every_kind_of_case_are_allowed(runtime: str) -> None:
    cases = [draw_case(seed, runtime) for seed in range(4 * len(SUITS))]
    assert {case.kind for case in cases} == set(SUITS)
    assert any(case.part == "episode" for case in cases)
    for case in cases:
        load_config([*case.overrides, "run_dir=unused"])


def test_every_part_is_struck_at_every_moment_in_both_ways() -> None:
    cases = moment_cases()
    struck = {(case.moment, case.part, case.kind) for case in cases}
    assert len(struck) == len(cases) == (1 + len(MOMENTS)) * 6 * len(SENT)
    assert {case.moment for case in cases} == {BUILDING, *MOMENTS}
    for case in cases[:10]:
        load_config([*case.overrides, "run_dir=unused"])
    assert all(hasattr(kind, method) for kind, method, _ in MOMENTS.values()), "a moment whose method was renamed"


def test_a_refused_setting_is_no_true_cause() -> None:
    case = next(case for seed in range(len(SUITS)) if (case := draw_case(seed, "ray")).kind == "nan")
    refused = "failed: learner.learning_rate=1e+30 is out of range; allowed: >= 0 and <= 2147483647."
    assert not true_cause(case, {}, 2, refused)
    assert true_cause(case, {}, 1, "failed: The gradient was not finite in 3 learner steps in a row (in learner-0)")


def test_the_end_of_a_run_is_no_true_cause_where_the_part_is_replaced() -> None:
    case = next(case for seed in range(100) if (case := draw_case(seed, "ray")).kind == "kill" and case.at >= 0)
    assert case.part != "driver"
    said = f"failed: {case.part}-0 was asked to load version 7 but received 8."
    assert not true_cause(case, {"part": f"{case.part}-0"}, 1, said)
    assert true_cause(case, {"part": f"{case.part}-0"}, 0, "done")
