"""Whole runs whose reward service hangs, raves or dies: they go on or stop as configured, and all is counted."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pytest
import ray
from transformers import LlamaModel

from asyncrlhf.actors.annotator import AnnotatorActor, RewardSpec
from asyncrlhf.actors.messages import RolloutBundle
from asyncrlhf.cluster.local_runtime import LocalLearner
from asyncrlhf.cluster.ray_handles import RayAnnotator
from asyncrlhf.data.data_config import ModelConfig, TaskConfig
from asyncrlhf.errors import AsyncRLHFError, ConfigError, RewardError
from asyncrlhf.models.checkpoint_folder import load_tokenizer
from asyncrlhf.rewards.reward import StuckError
from asyncrlhf.rewards.reward_config import RewardConfig
from asyncrlhf.types import Annotation, Payload
from tests import loop, ray_run
from tests.hanging import Hanging
from tests.integration.test_local_loop import interrupt_after
from tests.loop import FAKE, Finished
from tests.reward_server import Server, rewards_by_length, serving
from tests.unit.rewards.worlds import rollout, save_reward_model

# 15 steps of 16 rollouts. A failed call is not made again and opens no circuit unless a test is about that.
SHORT = (*FAKE, "steps=15", "fusion.max_batch=8")
HTTP = ("reward.kind=http", "reward.http.retries=0", "reward.http.breaker_failures=1000", "reward.timeout_seconds=0.3")


def summary_of(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def now_and_then(server: Server, misbehave: Callable[[dict[str, Any]], Any], every: int) -> None:
    """Answer well, but for each ``every``-th question after the first."""

    def answer(asked: dict[str, Any]) -> Any:
        return misbehave(asked) if len(server.asked) % every == 0 else rewards_by_length(asked)

    server.answer = answer


def failed_rows(done: Finished, cause: str) -> int:
    """Every failed rollout is in the records, without a reward and with its cause."""
    rows = done.rollouts
    failed = rows[rows.state == "failed"]
    assert len(failed) == sum(done.summary["ledger"]["failed"].values()) > 0
    assert failed.reward.isna().all()
    assert failed.drop_reason.str.contains(cause).all(), set(failed.drop_reason)
    return len(failed)


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("misbehaviour", "cause"),
    [("hang", "took longer than reward.timeout_seconds=0.3"), ("nonsense", "no JSON"), ("short", "scores for")],
)
@pytest.mark.more_but("nonsense")
def test_an_endpoint_that_misbehaves_now_and_then_costs_single_rollouts(
    tmp_path: Path, misbehaviour: str, cause: str
) -> None:
    with serving() as server:
        misbehave = {"hang": server.hang, "nonsense": lambda _: b"hello", "short": lambda _: {"rewards": []}}
        now_and_then(server, misbehave[misbehaviour], every=10 if misbehaviour == "hang" else 5)
        patience = "reward.timeout_seconds=0.3" if misbehaviour == "hang" else "reward.timeout_seconds=30"
        done = loop.run(tmp_path, *SHORT, *HTTP, patience, f"reward.http.url={server.url}")
    done.assert_ledger_whole()
    assert done.summary["exit_reason"] == "done"
    assert failed_rows(done, cause) < 15 * 16 / 2
    scored = done.trained
    assert (scored.reward == scored.response.str.len()).all(), "a score that failed never became a number"


def test_an_endpoint_that_dies_in_mid_run_ends_it_with_the_cause(tmp_path: Path) -> None:
    with serving() as server:

        def answer(asked: dict[str, Any]) -> Any:
            if len(server.asked) == 60:
                server.die()
            return rewards_by_length(asked)

        server.answer = answer
        with pytest.raises(
            AsyncRLHFError, match=r"of the last 16 rollouts failed .*(did not answer|is not asked)"
        ) as end:
            loop.run(tmp_path, *SHORT, *HTTP, f"reward.http.url={server.url}", "reward.http.breaker_failures=2")
    assert end.value.exit_code == 1
    summary = summary_of(tmp_path)
    assert summary["exit_reason"].startswith("failed: ")
    assert summary["ledger"]["adds_up"] and summary["ledger"]["trained"] > 0


def test_where_none_may_fail_the_first_failure_ends_the_run(tmp_path: Path) -> None:
    with serving() as server:
        now_and_then(server, lambda _: (400, {}, b"too rude to be rated"), every=9)
        with pytest.raises(
            AsyncRLHFError, match=r"1 of the last \d+ rollouts failed \(max_failure_fraction=0\); .*too rude"
        ) as end:
            loop.run(tmp_path, *SHORT, *HTTP, f"reward.http.url={server.url}", "max_failure_fraction=0")
    assert end.value.exit_code == 1
    summary = summary_of(tmp_path)
    assert "too rude to be rated" in summary["exit_reason"]
    assert summary["ledger"]["adds_up"] and sum(summary["ledger"]["failed"].values()) >= 1


def test_an_endpoint_that_is_down_at_the_start_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with serving() as server:
        pass
    with pytest.raises(ConfigError, match=r"reward\.kind=http gives no score for a first probe: .*did not answer"):
        loop.run(tmp_path, *SHORT, *HTTP, f"reward.http.url={server.url}")
    assert not (tmp_path / "config.yaml").exists()


@pytest.mark.in_turn
@pytest.mark.more
def test_a_function_that_hangs_or_ends_its_process_costs_single_rollouts(tmp_path: Path) -> None:
    done = loop.run(
        tmp_path, *FAKE, "steps=8", "reward.kind=python", "reward.target=tests.reward_functions:dies_at_99",
        "reward.timeout_seconds=0.3", "max_failure_fraction=1",
    )  # fmt: skip
    done.assert_ledger_whole()
    failed_rows(done, r"took longer than reward\.timeout_seconds|ended its process \(exit code 3\)")
    assert done.summary["ledger"]["trained"] > 0


def test_a_sum_of_a_reward_model_an_endpoint_and_a_rule_shows_its_parts(tmp_path: Path, tiny_model_path: Path) -> None:
    """The real engine, a reward model on the policy's own ids, and parts that add up in records and metrics."""
    model = save_reward_model(tmp_path / "rm", 19, context=128)
    with serving() as server:
        done = loop.run(
            tmp_path / "run", "steps=3", "batch_size=16", "reward=sum", f"++reward.parts.remote.http.url={server.url}",
            "++reward.parts.remote.kind=http", "++reward.parts.remote.weight=0.125", "++reward.parts.rm.kind=model",
            f"++reward.parts.rm.model.path={model}", "++reward.parts.rm.model.inputs=ids",
            "++reward.parts.rm.weight=0.5", "reward.missing_eos_penalty=0.25", "learner.learning_rate=1e-4",
            "async.mode=sync",
        )  # fmt: skip
    done.assert_ledger_whole()
    parts = ("rule", "length", "remote", "rm", "missing_eos")
    for row in done.metrics:
        rule, length, remote, rm, missing = (row[f"reward/{name}"] for name in parts)
        assert row["reward_mean"] == pytest.approx(
            rule - 0.001 * length + 0.125 * remote + 0.5 * rm + missing, abs=1e-6
        )
        assert length == pytest.approx(row["response_length_mean"])
        assert missing == pytest.approx(-0.25 * row["truncation_rate"])
    assert np.ptp([row["reward/rm"] for row in done.metrics]) > 0


def seen_by_the_learner(monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    seen: list[list[float]] = []
    original = LocalLearner.train

    async def train(self: LocalLearner, items: Any) -> Any:
        seen.append([item.reward for item in items])
        return await original(self, items)

    monkeypatch.setattr(LocalLearner, "train", train)
    return seen


@pytest.mark.in_turn
@pytest.mark.more
def test_running_statistics_go_on_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit what an uninterrupted run has; and the records hold the rewards as they were scored."""
    common = (*FAKE, "steps=6", "async.mode=fixed_lag", "async.lag=1", "checkpoint.every=3", "reward.normalize=running")
    seen = seen_by_the_learner(monkeypatch)
    whole = loop.run(tmp_path / "whole", *common)
    expected, seen[:] = list(seen), []
    raw = [r for step in range(6) for r in whole.trained.reward[whole.trained.consumed_at_version.str[0] <= step]]
    assert set(raw) == {0.0, 1.0}
    for step in range(6):
        so_far = whole.trained.reward[whole.trained.consumed_at_version.str[0] <= step].to_numpy()
        levels = {round(float((r - so_far.mean()) / so_far.std()), 9) for r in (0.0, 1.0)}
        assert {round(r, 9) for r in expected[step]} <= levels
    folder = tmp_path / "parts"
    interrupt_after(folder, 3, *common, "checkpoint.resume=auto")
    loop.run(folder, *common, "checkpoint.resume=auto")
    assert seen == expected


@pytest.mark.in_turn
@pytest.mark.more
@pytest.mark.parametrize("granularity", ["rollout", "chunk"])
def test_a_reward_model_that_hangs_costs_the_rollouts_that_it_hangs_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, granularity: str
) -> None:
    """The limit counts as the worker's death: its rollouts are scored alone, and those that hang again fail. All other
    scores are those of the whole rollout by a model that never hung."""
    model = save_reward_model(tmp_path / "rm", 19, context=128)
    hanging = Hanging(monkeypatch)
    deadly, base = 13, LlamaModel.forward

    def forward(self: LlamaModel, input_ids: Any, **options: Any) -> Any:
        if threading.current_thread().name == "reward-models" and bool((input_ids == deadly).any()):
            hanging.hang()
        return base(self, input_ids=input_ids, **options)

    with monkeypatch.context() as patch:
        patch.setattr(LlamaModel, "forward", forward)
        done = loop.run(
            tmp_path / "run", *FAKE, "steps=3", "fusion.max_batch=8", f"fusion={granularity}", "fusion.chunk_tokens=2",
            "reward.kind=model", f"reward.model.path={model}", "reward.model.inputs=ids",
            "reward.model_timeout_seconds=77", "max_failure_fraction=1",
        )  # fmt: skip
    done.assert_ledger_whole()
    failed_rows(
        done, r"reward worker died 2 times with it: A pass .* took longer than reward\.model_timeout_seconds=77"
    )
    rows = done.rollouts
    tokenizer = load_tokenizer(ModelConfig())
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in rows.prompt + rows.response]
    hangs = pd.Series([deadly in tokens for tokens in ids], index=rows.index)
    assert "trained" not in set(rows.state[hangs]) and "failed" not in set(rows.state[~hangs])
    assert done.summary["ledger"]["trained"] > 0 and set(hanging.limits) == {77.0}


class Sticky:
    """A reward worker whose model hangs in the first process, and works in the next."""

    def __init__(self, mark: Path) -> None:
        self._sticks = not mark.exists()
        mark.touch()

    def annotate(self, rollouts: Any, ticket: Any) -> tuple[list[Annotation], None]:
        if self._sticks:
            raise StuckError("A pass of the reward model took longer than reward.model_timeout_seconds=300.")
        return [Annotation(r.rollout_id, 1.0) for r in rollouts], None


class StickySpec(RewardSpec):
    def build(self, name: str) -> Any:
        return Sticky(Path(self.model.path))


def is_dead(actor: Any) -> bool:
    try:
        ray.get(actor.ready.remote(), timeout=60)
    except ray.exceptions.RayActorError:
        return True
    return False


@pytest.mark.thorough
@pytest.mark.usefixtures("ray_local")
async def test_under_ray_a_worker_whose_model_hangs_is_replaced(tmp_path: Path) -> None:
    spec = StickySpec(RewardConfig(), TaskConfig(), ModelConfig(path=str(tmp_path / "mark")), 8)
    worker = RayAnnotator(spec, 0, {"num_cpus": 0}, 60.0)
    await worker.ready()
    first = worker.actor
    assert await worker.annotate([Payload(ray.put([rollout(7, "a")]), 0)]) == [Annotation(7, 1.0)]
    assert worker.actor is not first
    await ray_run.until(lambda: is_dead(first), "the end of the actor that hung")
    await worker.close()


def test_a_run_says_once_that_batches_fail_counts_them_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(lambda asked: {"rewards": rewards_by_length(asked)["rewards"][:1]}) as server:
        http = ("reward.kind=http", f"reward.http.url={server.url}", "logging.progress=plain")
        done = loop.run(tmp_path, *FAKE, *http, "steps=4", "fusion.max_batch=8")
    sizes = [len(asked["completions"]) for asked in server.asked]
    assert sum(row["reward_batch_faults"] for row in done.metrics) == 2
    assert sum(size > 1 for size in sizes) == 3, "the probe and two batches"
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("rollouts were then scored one by one") == 1
    assert f"reward: The endpoint {server.url} returned 1 scores for" in said
    done.assert_ledger_whole()


@pytest.mark.in_turn
@pytest.mark.more
def test_a_function_that_hangs_in_company_costs_one_wait(tmp_path: Path) -> None:
    function = ("reward.kind=python", "reward.target=tests.reward_functions:slow_in_company")
    done = loop.run(tmp_path, *FAKE, *function, "reward.timeout_seconds=1", "steps=4", "fusion.max_batch=8")
    assert sum(row["reward_batch_faults"] for row in done.metrics) == 1
    assert done.summary["ledger"]["failed"] == {}


def test_a_function_with_a_wrong_number_of_scores_ends_the_run(tmp_path: Path) -> None:
    function = ("reward.kind=python", "reward.target=tests.reward_functions:one_for_more_than_two")
    with pytest.raises(
        RewardError, match=r"reward: The reward function returned 1 scores for \d+ completions\. It must"
    ):
        loop.run(tmp_path, *FAKE, *function, "steps=4", "fusion.max_batch=8")
    assert summary_of(tmp_path)["exit_reason"].startswith("failed: reward: The reward function returned 1 scores")


def actor_around(function: str) -> RewardSpec:
    settings = RewardConfig(kind="python", target=f"tests.reward_functions:{function}", threads=0)
    return RewardSpec(settings, TaskConfig(), ModelConfig(), 16)


def test_a_reward_workers_end_is_that_of_its_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed, and not left to be killed: a killed worker's function keeps its folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    actor = AnnotatorActor(actor_around("process_ids"), "reward-0")
    told, _ = actor.annotate([((0, 0),)], None, RolloutBundle([rollout(1, "x")]))
    child = psutil.Process(int(told.answer[0].reward))
    assert ray_run.is_alive(child) and any(tmp_path.iterdir())
    actor.close()
    assert not ray_run.is_alive(child) and not any(tmp_path.iterdir())


@pytest.mark.thorough
async def test_what_a_function_started_ends_with_its_killed_worker(ray_local: Any, tmp_path: Path) -> None:
    """The worker is ended as one that hangs: its function is at work, and has a process of its own."""
    handle = RayAnnotator(actor_around("leaves_a_process"), 0, {"num_cpus": 0}, 60.0)
    await handle.ready()
    (child,) = psutil.Process(await ray_run.process_id(handle.actor)).children()
    note = tmp_path / "process"
    asked = RolloutBundle([rollout(1, "x", metadata={"file": str(note)})])
    answer = handle.actor.annotate.options(num_returns=2).remote([((0, 0),)], None, asked)
    await ray_run.until(lambda: note.is_file() and note.read_text(), "the function's beginning")
    started = [child, psutil.Process(int(note.read_text()))]
    ray_local.kill(handle.actor)
    await ray_run.until(lambda: not any(map(ray_run.is_alive, started)), "the end of what the worker started", 10)
    del answer
