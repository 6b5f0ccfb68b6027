"""The simulator: the real controller over costs. Its figures are those of the closed forms and of real runs."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import yaml

from asyncrlhf.cli.main import main
from asyncrlhf.config.compose import load_config
from asyncrlhf.config.conversion import to_plain
from asyncrlhf.errors import ConfigError
from asyncrlhf.planner.fit import WARM_UP, costs_of_run, workload_of_run
from asyncrlhf.planner.ranking import steady
from asyncrlhf.planner.shapes import Workload
from asyncrlhf.planner.tables import Fitted
from asyncrlhf.records.read.cut_short import cut_lengths
from asyncrlhf.records.write.recorder import read_metrics
from asyncrlhf.simulator.cost_world import Conditions
from asyncrlhf.simulator.given import workload_of
from asyncrlhf.simulator.simulate import OVERRIDES, config_of_run, figures, in_cohorts, simulate
from tests import loop

CV = math.sqrt(math.exp(0.25) - 1)  # log-normal lengths whose logarithm has a standard deviation of 0.5
LENGTHS = Workload(8, 64, CV, 1024)
BATCH = ("steps=60", "batch_size=64", "generator.slots=64", "generator.max_completion_length=1024")
FLAT = ("task.max_prompt_length=32", "logging.progress=none", "logging.report=false")


def run(
    folder: Path, costs: Fitted, *overrides: str, conditions: Conditions | None = None, lengths: Workload = LENGTHS
) -> tuple[dict[str, float], dict[str, Any]]:
    config = load_config([*OVERRIDES, *BATCH, *FLAT, *overrides])
    if conditions:
        config = in_cohorts(config, int(conditions.cohort))
    summary = simulate(config, costs, lengths, folder, conditions)
    return figures(read_metrics(folder / "metrics.jsonl"), config.async_.bound), summary


def costs_of(generation: float, training: float) -> Fitted:
    """64 sequences of 64 tokens take ``generation`` seconds, a step ``training``."""
    return Fitted((generation / 64, 0.0, 0.0), (training, 0.0))


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("ratio", "bound", "siblings"),
    [
        pytest.param(0.6, 16, 1, marks=pytest.mark.thorough),
        pytest.param(0.3, 16, 1, marks=pytest.mark.thorough),
        (0.6, 16, 8),
        pytest.param(1.6, 8, 1, marks=pytest.mark.thorough),
        pytest.param(1.6, 3, 1, marks=pytest.mark.more),
    ],
)
def test_closed_forms_hold_on_the_real_controller(tmp_path: Path, ratio: float, bound: int, siblings: int) -> None:
    generation, training = (1.227, 1.227 * ratio) if ratio < 1 else (1.964 / ratio, 1.964)
    algorithm = "reinforce_pp" if siblings == 1 else "grpo"
    found, _ = run(
        tmp_path / "run",
        costs_of(generation, training),
        f"num_generations={siblings}",
        f"async.max_staleness={bound}",
        f"algorithm={algorithm}",
    )
    asked = steady(64 / generation, 64 / training, 64, 64, bound, LENGTHS.longest_of(siblings))
    assert found["step_seconds"] == pytest.approx(asked.step, rel=0.03)
    assert found["learner_idle"] == pytest.approx(asked.learner_idle, abs=0.05)
    low, high = asked.staleness
    assert low - 0.1 <= found["staleness"] <= high + 0.1


def test_the_gate_admits_what_can_be_trained_within_the_bound_and_no_more(tmp_path: Path) -> None:
    """Generation is four times as fast as training, so that generators are held back: the bound is used, and nothing is
    too old when its turn comes. With a gate that is off by one every fourth rollout is."""
    _, summary = run(tmp_path / "run", costs_of(0.491, 1.964), "num_generations=8", "async.max_staleness=2")
    assert summary["staleness"]["max"] == 2 and summary["staleness"]["mean"] > 1.9
    assert summary["ledger"]["dropped"] == {}


def test_the_same_seed_gives_the_same_records(tmp_path: Path) -> None:
    for name in ("a", "b"):
        run(tmp_path / name, costs_of(1.0, 0.5), "num_generations=4", "steps=20")
    first, second = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("a", "b"))
    host = {"loop_lag_p99"}
    assert [{k: v for k, v in row.items() if k not in host} for row in first] == [
        {k: v for k, v in row.items() if k not in host} for row in second
    ]


@pytest.mark.in_turn
@pytest.mark.more
def test_the_share_of_dropped_rollouts_is_counted(tmp_path: Path) -> None:
    """Lag 1 with one straggling replica in two: what it makes comes too late."""
    given = ("num_generations=4", "generator.replicas=2", "generator.slots=64", "async.max_staleness=1")
    found, summary = run(tmp_path / "run", costs_of(1.0, 0.1), *given, conditions=Conditions(slow={"generator-1": 5.0}))
    dropped, trained = sum(summary["ledger"]["dropped"].values()), summary["ledger"]["trained"]
    assert dropped > 0 and found["dropped_share"] == pytest.approx(dropped / trained, rel=0.3)


@pytest.mark.thorough
def test_long_responses_that_were_dropped_in_flight_are_not_forgotten(tmp_path: Path) -> None:
    """Of a hundred responses two take too long for the bound: no finished rollout shows it, only the dropped ones."""
    given = ("async.max_staleness=2", "num_generations=4", "batch_size=16", "generator.slots=16")
    fake = ("latency_median=0.5", "latency_sigma=0", "tail_probability=0.02", "correct_probability=0", "length_sigma=0",
            "length_mean=5", "latency_max_ratio=20")  # fmt: skip
    done = loop.run(
        tmp_path / "real", *given, "generator.engine=fake", "steps=100", "learner.virtual_step_seconds=0.2",
        "generator.max_completion_length=100", *(f"generator.fake.{word}" for word in fake),
    )  # fmt: skip
    real = figures(read_metrics(done.folder / "metrics.jsonl"), 2)
    seen, known = workload_of_run(done.folder), workload_of(done.folder)
    assert max(seen.lengths) == 5 and real["dropped_share"] > 0.05
    assert min(cut_lengths(done.folder)) > 5, "a dropped response counts as shorter than one that finished"
    assert known.lengths.count(100) / len(known.lengths) == pytest.approx(0.02, abs=0.01)
    costs = Fitted((0.1, 0.0, 0.0), (0.2, 0.0))  # 0.5 s for 5 tokens
    guessed, _ = run(tmp_path / "seen", costs, *given, "steps=100", lengths=seen)
    found, _ = run(tmp_path / "known", costs, *given, "steps=100", lengths=known)
    assert guessed["dropped_share"] == 0.0
    assert found["dropped_share"] == pytest.approx(real["dropped_share"], rel=0.3)
    assert found["staleness"] == pytest.approx(real["staleness"], abs=0.1)
    assert found["step_seconds"] == pytest.approx(real["step_seconds"], rel=0.1)

    (done.folder / "journal.jsonl").rename(tmp_path / "journal.jsonl")
    assert workload_of(done.folder) == seen, "without a journal nothing tells of dropped ones"
    (tmp_path / "journal.jsonl").rename(done.folder / "journal.jsonl")
    shutil.rmtree(done.folder / "rollouts")
    with pytest.raises(ValueError, match="has no rollouts"):
        workload_of(done.folder)


def test_a_simulated_run_says_so_and_is_no_source_of_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, summary = run(tmp_path / "run", costs_of(1.0, 0.5), "num_generations=4", "steps=10")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["simulated"] is True
    assert summary["ledger"]["adds_up"] and 0 < summary["controller_ms_per_rollout"] < 20
    assert main(["profile", "--from", str(tmp_path / "run")]) == 2
    assert "is a simulated run" in capsys.readouterr().err


@pytest.mark.in_turn
@pytest.mark.more
def test_a_slow_replica_costs_time(tmp_path: Path) -> None:
    given = ("num_generations=4", "generator.replicas=2", "generator.slots=32", "steps=30")
    calm, _ = run(tmp_path / "calm", costs_of(1.0, 0.3), *given)
    slow, _ = run(tmp_path / "slow", costs_of(1.0, 0.3), *given, conditions=Conditions(slow={"generator-1": 10.0}))
    assert slow["step_seconds"] > 1.4 * calm["step_seconds"]


def test_messages_and_publishes_delay_rollouts_and_are_no_work(tmp_path: Path) -> None:
    """Synchronous: after each publish a request, the rollout and its reward travel for 0.2 s in all, in which neither
    generator nor learner works; 0.1 s of a load are no work of the generator either. A snapshot and a transfer add
    their seconds."""
    free, real, published = (
        run(
            tmp_path / name,
            Fitted((0.01, 0.0, 0.0), (0.36, 0.0), **costs),
            *("async=sync", "num_generations=4", "steps=16"),
            lengths=Workload(8, 64, 0.0, 64),
        )[0]
        for name, costs in (
            ("free", {}),
            ("real", {"load": 0.1, "submit": 0.05, "collect": 0.05}),
            ("published", {"load": 0.1, "transfer": 0.2, "snapshot": 0.05}),
        )
    )
    assert published["step_seconds"] - free["step_seconds"] == pytest.approx(0.35, abs=0.01)
    assert free["step_seconds"] == pytest.approx(1.0, abs=0.01)
    assert real["step_seconds"] == pytest.approx(1.3, abs=0.01)
    assert free["generator_idle"] == pytest.approx(0.36, abs=0.01)
    assert real["generator_idle"] == pytest.approx(1 - 0.64 / 1.3, abs=0.01)
    assert real["learner_idle"] == pytest.approx(1 - 0.36 / 1.3, abs=0.01)


@pytest.mark.thorough
def test_a_cohort_does_what_its_replicas_do(tmp_path: Path) -> None:
    """16 replicas of 4 slots, and 4 that stand for 4 each: an iteration costs by the sequences of one replica. Pooled
    slots are never left free by a group that does not fit, which makes them a little quicker."""
    costs = Fitted((0.01, 0.002, 0.0), (0.1, 0.0))
    given = ("num_generations=4", "generator.replicas=16", "generator.slots=4", "steps=24")
    each, _ = run(tmp_path / "each", costs, *given)
    four, _ = run(tmp_path / "four", costs, *given, conditions=Conditions(cohort=4))
    assert four["step_seconds"] == pytest.approx(each["step_seconds"], rel=0.12)
    assert four["staleness"] == pytest.approx(each["staleness"], abs=0.3)
    with pytest.raises(ConfigError, match="cohort of 3 replicas does not divide"):
        run(tmp_path / "three", costs, *given, conditions=Conditions(cohort=3))


@pytest.mark.more
@pytest.mark.in_turn
def test_costs_of_a_run_are_found_in_its_records_and_predict_it(tmp_path: Path) -> None:
    """The local runtime's own costs are known: 0.05 s an iteration, 0.2 s a step."""
    done = loop.run(
        tmp_path / "real",
        "generator.engine=hf",
        "steps=60",
        "batch_size=16",
        "num_generations=4",
        "generator.slots=16",
        "generator.virtual_step_seconds=0.05",
        "learner.virtual_step_seconds=0.2",
    )
    costs = costs_of_run(done.folder)
    assert costs.decode(16, 8.0) == pytest.approx(0.05, rel=0.1)
    assert costs.train([10] * 16) == pytest.approx(0.2, rel=0.02)
    assert main(["profile", "--from", str(done.folder), "--out", str(tmp_path / "profile.json")]) == 0
    assert Fitted.read(tmp_path / "profile.json") == costs
    assert main(["simulate", "--from", str(done.folder), "--out", str(tmp_path / "simulated")]) == 0
    real, simulated = (
        figures(read_metrics(folder / "metrics.jsonl"), 2) for folder in (done.folder, tmp_path / "simulated")
    )
    assert simulated["step_seconds"] == pytest.approx(real["step_seconds"], rel=0.1)
    assert simulated["learner_idle"] == pytest.approx(real["learner_idle"], abs=0.05)
    assert simulated["staleness"] == pytest.approx(real["staleness"], abs=0.3)
    assert simulated["generator_idle"] == pytest.approx(real["generator_idle"], abs=0.05)

    # All iterations together last as long as in the records, also where no line through them does.
    spans = ds.dataset(done.folder / "spans").to_table().to_pandas()
    late = read_metrics(done.folder / "metrics.jsonl")[WARM_UP]["wall_time"]
    decode = spans[(spans.kind == "decode") & (spans.start >= late)]
    base, each, _ = costs.decode_terms
    whole = base * decode.iterations.sum() + each * decode.sequence_iterations.sum()
    assert whole == pytest.approx(decode.busy_seconds.sum(), rel=1e-6)

    # Without delays a message takes next to no time; a reward that came 0.3 s later had three messages.
    assert costs.submit == costs.collect < 1e-3
    for file in (done.folder / "rollouts").glob("*.parquet"):
        table = pq.read_table(file)
        column = table.column_names.index("scored_at")
        pq.write_table(table.set_column(column, "scored_at", pc.add(table["scored_at"], 0.3)), file)
    assert costs_of_run(done.folder).submit == pytest.approx(costs.submit + 0.1, abs=1e-6)
    check_cpu_seconds(done.folder, costs)


def check_cpu_seconds(folder: Path, costs: Fitted) -> None:
    """Where the parts say that they used a core for half of the time, and 0.2 s more per second that they waited for
    it, and the controller 2 ms per call and 3 ms per rollout, an iteration costs half its seconds, a call 2 ms, and a
    rollout 1 ms in each of its three calls. What their cores did beside that counts as other processes; a learner on a
    core of its own is not part of it."""
    for file in (folder / "spans").glob("*.parquet"):
        table = pq.read_table(file)
        spans = {name: table[name].to_numpy() for name in table.column_names}
        base, each, _ = costs.decode_terms
        work = base * spans["iterations"] + each * spans["sequence_iterations"]
        work = np.where(spans["kind"] == "decode", work, spans["busy_seconds"])
        used = np.where(spans["kind"] == "wait", 0.0, (0.5 * work + 0.2 * spans["busy_seconds"]) / 1.2)
        column = table.column_names.index("cpu_seconds")
        pq.write_table(table.set_column(column, "cpu_seconds", pa.array(used)), file)
    rows = read_metrics(folder / "metrics.jsonl")
    for row in rows:
        row["remote_calls"] = 10 + row["step"] % 5
        row["controller_cpu_seconds"] = 0.002 * row["remote_calls"] + 0.003 * row["sequences"]
        # Steps of 0.2 s: a part with work has 0.7 / 1.2 of a core.
        row["shared_cpu_seconds"] = 0.2 * 0.3 + row["controller_cpu_seconds"] + 0.2 * 0.7 / 1.2 * 2
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = costs_of_run(folder, cpu=True)
    assert found.decode(16, 8.0) == pytest.approx(0.5 * costs.decode(16, 8.0), rel=1e-3)
    assert found.cold == pytest.approx(0.2, rel=1e-3)
    lengths = [10] * 16  # CPU seconds of a learner that shares cores; of one with its own core those of the clock
    assert found.train(lengths) == pytest.approx(0.7 / 1.2 * costs.train(lengths), rel=0.02)
    assert costs_of_run(folder, cpu=True, apart=True).train(lengths) == pytest.approx(costs.train(lengths), rel=1e-6)
    assert (found.call, found.message) == pytest.approx((2e-3, 1e-3)) and (found.submit, found.collect) == (0.0, 0.0)
    assert found.others == pytest.approx(0.3, abs=0.03)
    assert costs_of_run(folder, cpu=True, apart=True).others == pytest.approx(0.3 + 0.7 / 1.2, abs=0.05)
    plain = costs_of_run(folder)
    assert plain.call == plain.message == plain.others == 0.0 < plain.submit


@pytest.mark.parametrize("words", [("collective",), ("shared_memory",), ("disk", "weights.disk_path=/tmp/weights")])
def test_a_run_with_any_transport_can_be_simulated(tmp_path: Path, words: tuple[str, ...]) -> None:
    settings = to_plain(load_config([f"weights.transport={words[0]}", *words[1:]]))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    assert config_of_run(tmp_path, ["async.max_staleness=3"]).async_.bound == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["simulate"], "give one of --from and --profile"),
        (["simulate", "--from", "nowhere"], "nowhere holds no metrics.jsonl"),
        (["simulate", "--profile", "nowhere.json", "--mean-length", "9"], "nowhere.json is not a profile"),
        (["simulate", "--profile", "x", "--mean-length", "nan"], "is too small"),
        (["profile", "--seconds", "x"], "invalid float value"),
    ],
)
def test_nonsense_is_one_sentence(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "learner",
    [
        "learner=zero3 learner.zero_offload=cpu_params",
        "learner.backend=deepspeed learner.zero_stage=1 learner.sequence_parallel_size=2",
        "learner.tensor_parallel_size=2", "learner.expert_parallel_size=2", "learner.context_parallel_size=2",
        "learner.pipeline_parallel_size=2", "learner.optim=adamw_8bit learner.gpus=1",
        "learner.sharding=fsdp2 learner.dp_replicate_size=2 learner.gradient_reduction=update",
        "learner.routing_replay=true",
    ],
)  # fmt: skip
def test_a_run_with_any_learner_can_be_simulated(learner: str) -> None:
    """A simulated learner is one rank, whatever the run's own was: no setting of the old layout may stay beside it."""
    own = ["learner.ranks=4", *learner.split()]
    load_config(own)
    assert load_config([*own, *OVERRIDES]).learner.ranks == 1
