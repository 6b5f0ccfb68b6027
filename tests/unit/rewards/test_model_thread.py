"""Time limits on models and judges: what hangs costs its caller no more than the limit, and leaves nothing wrong."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncrlhf.data.data_config import ModelConfig
from asyncrlhf.errors import ConfigError, ReplicaError, RewardError
from asyncrlhf.models.checkpoint_folder import load_tokenizer
from asyncrlhf.readahead.owners import Chunk
from asyncrlhf.readahead.readers import ReadingModel
from asyncrlhf.rewards import model as model_module
from asyncrlhf.rewards.build_scorer import build_scorer
from asyncrlhf.rewards.judge import Asker
from asyncrlhf.rewards.model import ModelSource
from asyncrlhf.rewards.model_thread import ModelThread
from asyncrlhf.rewards.reward import Scorer, StuckError
from asyncrlhf.rewards.reward_config import RewardConfig, RewardModelConfig
from tests.hanging import Hanging
from tests.numeric import assert_close
from tests.unit.rewards.worlds import rollout, save_reward_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reward_model(tmp_path_factory.mktemp("rm"), 19)


def source(folder: Path, thread: ModelThread | None = None) -> ModelSource:
    config = RewardModelConfig(path=str(folder), inputs="ids")
    return ModelSource(config, "reward", load_tokenizer(ModelConfig()), max_batch_tokens=4096, thread=thread)


def test_all_calls_share_one_thread_and_bring_back_values_and_errors() -> None:
    thread = ModelThread(60)

    def refuse() -> None:
        raise ConfigError("no")

    names = {thread.call("x", threading.get_ident) for _ in range(3)}
    names.add(thread.call_without_limit(threading.get_ident))
    assert len(names) == 1 and threading.get_ident() not in names
    with pytest.raises(ConfigError, match=r"^no$"):
        thread.call("x", refuse)
    assert thread.call("x", lambda: 3) == 3
    thread.close()
    thread.close()
    assert thread.call("x", lambda: 4) == 4  # a thread of its own again


def test_a_call_that_hangs_is_given_up_and_those_behind_it_never_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = Hanging(monkeypatch, for_ever=True)
    thread = ModelThread(7.5)
    done: list[str] = []
    with pytest.raises(StuckError, match=r"^A pass took longer than reward\.model_timeout_seconds=7\.5\.$"):
        thread.call("A pass", hanging.hang)
    with pytest.raises(
        StuckError, match=r"^Another did not begin within reward\.model_timeout_seconds=7\.5: an earlier"
    ):
        thread.call("Another", lambda: done.append("given up"))
    assert hanging.limits == [7.5, 7.5]
    hanging.release()
    thread.call("A third", lambda: done.append("third"))
    assert done == ["third"]


def test_a_real_limit_passes() -> None:
    """The one test here that waits for a clock: the call would never end before it."""
    released = threading.Event()
    with pytest.raises(StuckError, match=r"timeout_seconds=0\.2"):
        ModelThread(0.2).call("A pass", lambda: released.wait(120))
    released.set()


def hang_on(monkeypatch: pytest.MonkeyPatch, hanging: Hanging, token: int) -> list[int]:
    """Passes over a sequence with this token hang; returns the sizes of all passes."""
    original, sizes = model_module.score_batch, []

    def score_batch(model: Any, input_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        sizes.append(len(input_ids))
        if bool((input_ids == token).any()):
            hanging.hang()
        return original(model, input_ids, mask)

    monkeypatch.setattr(model_module, "score_batch", score_batch)
    return sizes


def test_a_pass_that_hangs_is_no_failed_score_but_a_worker_to_replace(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scorer must not go on asking the same model for one rollout after the other."""
    hanging = Hanging(monkeypatch)
    settings = RewardConfig(
        kind="model", model=RewardModelConfig(path=str(folder), inputs="ids"), model_timeout_seconds=12.0
    )
    scorer = build_scorer(settings, load_tokenizer(ModelConfig()), lambda: pytest.fail("no task is asked for"), 8)
    sizes = hang_on(monkeypatch, hanging, token=13)
    good, bad = rollout(0, "", ids=[4, 5]), rollout(1, "", ids=[13, 5, 6])
    with pytest.raises(
        StuckError, match=r"reward model over 2 sequences of up to 4 tokens took .*seconds=12"
    ) as caught:
        scorer.score([good, bad])
    assert isinstance(caught.value, ReplicaError) and not isinstance(caught.value, RewardError)
    assert sizes == [2] and hanging.limits == [12.0]
    (result,) = scorer.score([good])
    assert_close(result.reward, source(folder).scores([good])[0])
    scorer.close()


def test_what_was_read_ahead_before_a_pass_hung_changes_no_score(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass that was given up goes on later, and writes to caches that nobody reads any more."""
    hanging = Hanging(monkeypatch)
    whole = source(folder)
    reader = ReadingModel(source(folder, ModelThread(9.0)), 4096, 4096)
    done = [rollout(number, "", ids=[4 + number, 5, 6, 7, 8, 9]) for number in range(3)]
    chunks = [Chunk(r.rollout_id, 0, 1, [*r.prompt.token_ids.tolist(), *r.response_ids.tolist()][:4]) for r in done]
    reader.prefill([], chunks)
    assert reader.held > 0
    extend = reader._extend
    calls: list[int] = []

    def hang_once(extensions: Any) -> list[torch.Tensor]:
        calls.append(len(extensions))
        if len(calls) == 1:
            hanging.hang()
        return extend(extensions)

    monkeypatch.setattr(reader, "_extend", hang_once)
    with pytest.raises(StuckError, match=r"over 9 new tokens of 3 sequences took longer"):
        reader.scores(done)
    assert reader.held == 0
    assert_close(reader.scores(done), whole.scores(done), atol=1e-5)
    calls.clear()
    with pytest.raises(StuckError):
        reader.prefill([], [Chunk(7, 0, 1, [1, 2, 3, 4])])
    assert reader.held == 0


@dataclass
class Steps:
    """An engine that ends its requests in the order and at the steps that it is told; ``clock`` counts its steps."""

    ends: dict[str, int]  # prompt -> steps that its answer takes
    hanging: Hanging | None = None
    left: dict[str, int] = field(default_factory=dict)
    prompts: dict[str, str] = field(default_factory=dict)
    aborted: deque[str] = field(default_factory=deque)
    time: float = 0.0

    def add_request(self, request_id: str, prompt: Any, params: Any) -> None:
        assert request_id not in self.prompts, "a name that was used before"
        self.left[request_id], self.prompts[request_id] = self.ends[prompt], prompt

    def step(self) -> Sequence[Any]:
        if self.hanging is not None:
            self.hanging.hang()
        self.time += 1
        self.left = {name: left - 1 for name, left in self.left.items()}
        over = [name for name, left in self.left.items() if left == 0]
        for name in over:
            del self.left[name]
        answers = [(name, name in over) for name in [*over, *self.left]]
        return [
            SimpleNamespace(
                request_id=name, finished=finished, outputs=[SimpleNamespace(text=f"to {self.prompts[name]}")]
            )
            for name, finished in answers
        ]

    def abort_request(self, request_ids: list[str]) -> None:
        self.aborted.extend(self.prompts[name] for name in request_ids)
        for name in request_ids:
            del self.left[name]


def test_answers_that_take_too_long_are_taken_back_and_the_others_count() -> None:
    engine = Steps({"short": 2, "longer": 5, "endless": -1, "long": 6})
    asker = Asker(engine, None, ModelThread(5.0), clock=lambda: engine.time)
    assert asker.answers({3: "endless", 0: "short", 7: "long", 1: "longer"}) == {0: "to short", 1: "to longer"}
    assert sorted(engine.aborted) == ["endless", "long"] and not engine.left
    assert asker.answers({2: "short"}) == {2: "to short"} and engine.time == 7
    assert asker.answers({}) == {}


def test_a_step_of_a_judge_that_hangs_leaves_nothing_to_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Steps({"short": 2, "other": 3}, Hanging(monkeypatch))
    asker = Asker(engine, None, ModelThread(5.0), clock=lambda: engine.time)
    with pytest.raises(StuckError, match=r"^A step of the judge took longer than reward\.model_timeout_seconds=5\.$"):
        asker.answers({0: "other"})
    engine.hanging = None
    assert asker.answers({0: "short"}) == {0: "to short"}
    assert list(engine.aborted) == ["other"]


def test_two_models_of_a_sum_share_the_thread(folder: Path) -> None:
    model = {"kind": "model", "model": {"path": str(folder), "inputs": "ids"}}
    settings = RewardConfig(kind="sum", parts={"a": model, "b": {**model, "weight": 2.0}})
    scorer: Scorer = build_scorer(settings, load_tokenizer(ModelConfig()), lambda: pytest.fail("no task"), 8)
    one, other = (s for s, _ in scorer.sources.values())
    assert isinstance(one, ModelSource) and isinstance(other, ModelSource) and one.thread is other.thread
    assert one.thread.seconds == settings.model_timeout_seconds
    (result,) = scorer.score([rollout(0, "", ids=[4, 5])])
    assert_close(result.reward, 3 * result.parts["a"])
    scorer.close()
