"""The sweeps that come with the package: each composes, and asks what its name says."""

from __future__ import annotations

import pytest

from asyncrlhf.sweeps.plan import plan_sweep

# One algorithm and one seed stand for all where there are many: composing a job takes a tenth of a second.
SHIPPED = {"staleness": 11, "staleness_quick": 5, "corrections": 4, "publish_every": 4, "replay": 3, "replicas": 2}


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.more_but(every=3)
def test_a_shipped_sweep_composes(name: str) -> None:
    plan = plan_sweep([f"experiment={name}", "algorithm=decoupled_grpo", "sweep.seeds=1"])
    assert len({(job.part, *job.choices.items()) for job in plan.jobs}) == SHIPPED[name] and plan.name == name
    assert {job.config.runtime for job in plan.jobs if job.exclusive} <= {"ray"}
    assert plan.left_out == ()
    assert all("," not in key for job in plan.jobs for key in job.choices)
