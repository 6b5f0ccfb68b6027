"""Placements on a Ray cluster of three nodes, simulated on this machine; runs join it by ``ray.address``."""

from __future__ import annotations

from typing import Any

import pytest

from tests.processes import reports_of

pytestmark = [pytest.mark.more, pytest.mark.in_turn]  # all share the costly start of a cluster


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each run of ``cluster_process`` reported. A process of its own: this one has its own Ray."""
    return reports_of("tests.integration.cluster_process", tmp_path_factory.mktemp("cluster"), seconds=280)[0]


def nodes_of(report: dict[str, Any], kind: str) -> set[str]:
    return {place["node_id"] for name, place in report["where"].items() if name.startswith(kind)}


def groups_of(report: dict[str, Any], kind: str) -> set[str]:
    return {place["group"] for name, place in report["where"].items() if name.startswith(kind)}


@pytest.mark.in_turn
@pytest.mark.parametrize("placement", ["separate", "interleave", "flatten"])
def test_every_actor_sits_where_its_seat_is(runs: dict[str, dict[str, Any]], placement: str) -> None:
    report = runs[placement]
    assert report.get("error") is None and report["steps"] == 3 and report["staleness"] <= 2
    for name, place in report["where"].items():
        if placement != "interleave" and name.startswith("reward"):
            assert place["group"] == "", "a rule needs no device"
            continue
        assert place["node_id"] == place["bundle_node"], name
        assert place["group"] == place["bundle_group"], name


def test_separate_keeps_the_learners_node_free_of_generators(runs: dict[str, dict[str, Any]]) -> None:
    report = runs["separate"]
    assert len(nodes_of(report, "learner")) == 1
    assert nodes_of(report, "learner").isdisjoint(nodes_of(report, "generator"))
    assert len(groups_of(report, "generator")) == 2


def test_interleave_gives_rewards_a_node_of_their_own_too(runs: dict[str, dict[str, Any]]) -> None:
    report = runs["interleave"]
    sets = [nodes_of(report, kind) for kind in ("learner", "generator", "reward")]
    assert [len(s) for s in sets] == [1, 1, 1] and len(set.union(*sets)) == 3


def test_flatten_puts_learner_and_generator_into_one_bundle(runs: dict[str, dict[str, Any]]) -> None:
    where = runs["flatten"]["where"]
    # A group of one bundle: to be in the same group is to be on the same device.
    assert where["learner-0"]["group"] == where["generator-0"]["group"]
    assert where["learner-0"]["node_id"] == where["generator-0"]["node_id"]
    assert where["generator-1"]["group"] != where["generator-0"]["group"]


def test_labels_put_each_side_on_its_nodes(runs: dict[str, dict[str, Any]]) -> None:
    report = runs["labelled"]
    assert report.get("error") is None and report["steps"] == 3
    kinds = {name: place["labels"].get("kind") for name, place in report["where"].items()}
    assert kinds["learner-0"] == "slow" and kinds["generator-0"] == kinds["generator-1"] == "quick"


def test_a_label_that_no_node_has_is_one_sentence(runs: dict[str, dict[str, Any]]) -> None:
    report = runs["no_such"]
    assert report["exit_code"] == 2 and report["where"] == {}
    assert report["error"] == (
        "generator-0 needs 1 CPU with kind=best on one node, but Ray has 6 CPUs on 3 nodes, and no node has as much."
    )


def test_parts_of_other_nodes_keep_their_memory(runs: dict[str, dict[str, Any]]) -> None:
    """What Ray's own processes inherit on one machine travels to a cluster's nodes in the runtime environment."""
    assert {place["malloc"] for place in runs["separate"]["where"].values()} == {str(2 * 10**9)}


def test_what_the_cluster_can_never_hold_is_one_sentence(runs: dict[str, dict[str, Any]]) -> None:
    report = runs["too_wide"]
    assert report["exit_code"] == 2 and report["where"] == {}
    assert report["error"] == (
        "generator-0 needs 4 CPUs on one node, but Ray has 6 CPUs on 3 nodes, and no node has as much."
    )


def test_what_others_hold_is_waited_for_with_an_end(runs: dict[str, dict[str, Any]]) -> None:
    report = runs["busy"]
    assert report["exit_code"] == 1 and report["where"] == {}
    assert "were not free within 2 s (cluster.start_timeout_seconds); free in Ray: " in report["error"]


def test_an_address_that_leads_nowhere_is_one_sentence(runs: dict[str, dict[str, Any]]) -> None:
    report = runs["nowhere"]
    assert report["exit_code"] == 2 and report["error"].startswith("ray.address=127.0.0.1:1 reaches no cluster: ")
    assert "Connection refused; allowed: auto, or HOST:PORT" in report["error"]
    assert "allowed: auto, or HOST:PORT" in runs["client"]["error"]
