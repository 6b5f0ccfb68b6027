"""Remote rewards against a real server: patience, nonsense, the circuit breaker, and what is sent."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import pytest

from asyncrlhf.errors import RewardError
from asyncrlhf.rewards import endpoint as module
from asyncrlhf.rewards.endpoint import Breaker, HttpSource
from asyncrlhf.rewards.reward import Scorer, ServiceError, WeightedSource
from asyncrlhf.rewards.reward_config import HttpConfig, RewardConfig
from tests.reward_server import Server, rewards_by_length, serving
from tests.unit.rewards.worlds import rollout


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between two tries, which are not made."""
    made: list[float] = []
    monkeypatch.setattr(module.time, "sleep", made.append)
    return made


def source(server: Server, seconds: float = 5.0, **settings: Any) -> HttpSource:
    return HttpSource(HttpConfig(url=f"{server.url}/score", **settings), seconds)


def scorer(made: HttpSource) -> Scorer:
    return Scorer({"score": WeightedSource(made)}, RewardConfig(kind="http", http=HttpConfig(url="http://x")), 16)


def in_turn(*answers: Any) -> Any:
    """One answer after the other, the last one for ever; a callable is called."""
    order = itertools.chain(answers, itertools.repeat(answers[-1]))

    def answer(asked: dict[str, Any]) -> Any:
        reply = next(order)
        return reply(asked) if callable(reply) else reply

    return answer


def test_the_columns_go_out_and_the_scores_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_TEST_TOKEN", "secret")
    with serving() as server:
        made = source(server, token_env="REWARD_TEST_TOKEN")
        assert made.scores([rollout(7, "ab"), rollout(8, "c", answer=None, length=2)]) == [2.0, 1.0]
        server.answer = lambda asked: [0.5, -1]
        assert made.scores([rollout(7, "ab"), rollout(8, "c")]) == [0.5, -1.0], "a bare list will do"
    assert server.asked[0] == {
        "prompts": ["prompt 7", "prompt 8"],
        "completions": ["ab", "c"],
        "answer": ["a", None],
        "metadata": [{"number": 7}, {"number": 8}],
        "completion_ids": [[0, 1, 2], [0, 1]],
    }
    assert server.paths[0] == "/score"
    assert server.headers[0]["Authorization"] == "Bearer secret"


def test_it_is_tried_again_with_growing_pauses(waits: list[float]) -> None:
    busy = (503, {}, {"error": "busy"})
    with serving(in_turn(busy, busy, (429, {"Retry-After": "3"}, {}), rewards_by_length)) as server:
        assert source(server, retries=3).scores([rollout(1, "abc")]) == [3.0]
    assert len(server.asked) == 4
    assert 0.25 <= waits[0] <= 0.5 and 0.5 <= waits[1] <= 1.0 and waits[2] == 3.0


def test_a_service_that_stays_down_is_named_with_its_last_words() -> None:
    with serving(lambda _: (500, {}, b"database is gone")) as server:
        made = source(server, retries=2)
        with pytest.raises(
            ServiceError, match=r"score answered 500 Internal Server Error \(database is gone\)\. Tried 3"
        ):
            made.scores([rollout(1, "abc")])
    assert len(server.asked) == 3
    with pytest.raises(ServiceError, match=r"did not answer: .*Connection refused\. Tried 3 times"):
        made.scores([rollout(1, "abc")])


def test_a_service_that_hangs_costs_its_time_limit_and_no_more() -> None:
    with serving() as server:
        server.answer = server.hang
        started = time.monotonic()
        with pytest.raises(ServiceError, match=r"took longer than reward\.timeout_seconds=0\.3\. Tried 2 times"):
            source(server, seconds=0.3, retries=1).scores([rollout(1, "abc")])
        assert time.monotonic() - started < 10


def test_an_answer_that_trickles_in_is_held_to_the_limit_too() -> None:
    """Each byte arrives well within any pause that a socket would wait for."""
    import socket
    import threading

    listener = socket.create_server(("127.0.0.1", 0))
    ended = threading.Event()

    def trickle() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            while not ended.wait(0.05):
                try:
                    connection.sendall(b" ")
                except OSError:
                    return

    thread = threading.Thread(target=trickle, daemon=True)
    thread.start()
    made = HttpSource(HttpConfig(url=f"http://127.0.0.1:{listener.getsockname()[1]}", retries=0), 0.4)
    with pytest.raises(ServiceError, match=r"took longer than reward\.timeout_seconds=0\.4"):
        made.scores([rollout(1, "abc")])
    ended.set()
    listener.close()
    thread.join(5)


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (b"<html>welcome</html>", "answered no JSON: '<html>welcome</html>'"),
        ({"rewards": [1.0, 2.0]}, "returned 2 scores for 1 completions"),
        ({"scores": [1.0]}, "returned NoneType, not a list of numbers"),
        (3, "returned int, not a list of numbers"),
        ({"rewards": [None]}, "returned None, which is not a finite number"),
        (b'{"rewards": [NaN]}', "returned nan, which is not a finite number"),
        (b'{"rewards": [1e999]}', "returned inf, which is not a finite number"),
        ({"rewards": ["1.0"]}, "returned '1.0', which is not a finite number"),
        ((404, {}, {}), "answered 404 Not Found"),
        ((401, {}, b"who are you?"), "answered 401 Unauthorized (who are you?)"),
    ],
)
def test_nonsense_is_a_failure_with_its_cause_and_not_asked_for_again(answer: Any, cause: str) -> None:
    with serving(lambda _: answer) as server:
        (result,) = scorer(source(server)).score([rollout(1, "abc")])
    assert result.reward is None and result.error and cause in result.error
    assert server.url in result.error
    assert len(server.asked) == 1


def test_one_bad_number_fails_its_own_rollout() -> None:
    with serving(lambda _: {"rewards": [1.0, None, 3.0]}) as server:
        results = scorer(source(server)).score([rollout(i, "x") for i in range(3)])
    assert [r.reward for r in results] == [1.0, None, 3.0]
    assert len(server.asked) == 1


def test_a_rollout_that_the_service_refuses_does_not_take_the_others_with_it() -> None:
    def picky(asked: dict[str, Any]) -> Any:
        return (422, {}, b"cannot read this") if "bad" in asked["completions"] else rewards_by_length(asked)

    with serving(picky) as server:
        results = scorer(source(server)).score([rollout(1, "x"), rollout(2, "bad"), rollout(3, "yy")])
    assert [r.reward for r in results] == [1.0, None, 2.0]
    assert results[1].error and "422" in results[1].error and "cannot read this" in results[1].error


def test_what_json_cannot_say_is_a_failure() -> None:
    with serving() as server, pytest.raises(RewardError, match="cannot be sent"):
        source(server).scores([rollout(1, "x", metadata={"value": object()})])
    assert server.asked == []


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def refused(breaker: Breaker) -> bool:
    try:
        breaker.enter("It")
    except ServiceError:
        return True
    return False


def test_the_breaker_opens_tries_once_and_closes() -> None:
    clock = Clock()
    breaker = Breaker(3, 10.0, clock)
    for _ in range(2):
        breaker.failed("x")
    breaker.succeeded()
    for _ in range(2):
        breaker.failed("x")
    assert not refused(breaker), "two failures in a row are not three"
    breaker.failed("the last straw")
    with pytest.raises(ServiceError, match=r"It is not called for 10 s after 3 failures in a row, .*the last straw"):
        breaker.enter("It")
    clock.now = 10.5
    assert not refused(breaker), "its time is over: one tries"
    assert refused(breaker), "and only one"
    breaker.failed("still down")
    clock.now = 20.0
    assert refused(breaker), "the failed try opened it again"
    clock.now = 21.0
    assert not refused(breaker)
    breaker.succeeded()
    assert not refused(breaker) and not refused(breaker)


def test_an_open_circuit_asks_nobody() -> None:
    with serving(lambda _: b"nonsense") as server:
        made = scorer(source(server, breaker_failures=3))
        results = made.score([rollout(i, "x") for i in range(20)])
    causes: Sequence[str | None] = [r.error for r in results]
    assert len(server.asked) == 3, "the call of all 20 and two single ones"
    assert all(cause and "no JSON" in cause for cause in causes)
    assert sum("is not called for 30 s after 3 failures" in (cause or "") for cause in causes) == 18


def test_an_endpoint_with_one_score_a_call_is_said_once_and_then_asked_for_each_rollout() -> None:
    with serving(lambda asked: {"rewards": rewards_by_length(asked)["rewards"][:1]}) as server:
        made = scorer(source(server))
        results = [r for _ in range(4) for r in made.score([rollout(i, "xyz") for i in range(8)])]
    assert [r.reward for r in results] == [3.0] * 32
    assert [len(asked["completions"]) for asked in server.asked] == ([8] + [1] * 8) * 2 + [1] * 16
    first, second = (fault for r in results for fault in r.faults)
    assert first.kind == "wrong_count"
    assert f"{server.url}/score returned 1 scores for 8 completions. 8 rollouts were then scored" in first.cause
    assert first.cause.endswith("one by one.") and second.cause.endswith("one by one, as all others will be.")


def test_an_endpoint_that_refuses_a_batch_now_and_then_keeps_its_batches() -> None:
    with serving() as server:
        server.answer = lambda asked: [] if len(server.asked) % 6 == 1 else rewards_by_length(asked)
        made = scorer(source(server))
        results = [r for _ in range(6) for r in made.score([rollout(i, "xyz") for i in range(4)])]
    assert [r.reward for r in results] == [3.0] * 24
    assert [len(asked["completions"]) for asked in server.asked] == [4, 1, 1, 1, 1, 4] * 3


def test_an_endpoint_that_hangs_on_batches_alone_is_asked_for_each_rollout() -> None:
    with serving() as server:
        server.answer = lambda asked: server.hang(asked) if len(asked["completions"]) > 1 else rewards_by_length(asked)
        made = scorer(source(server, seconds=0.3, retries=0))
        results = [r for _ in range(3) for r in made.score([rollout(i, "xyz") for i in range(4)])]
    assert [r.reward for r in results] == [3.0] * 12
    assert [len(asked["completions"]) for asked in server.asked] == ([4] + [1] * 4) * 2 + [1] * 4


@pytest.mark.parametrize("status", [301, 302, 303])
def test_a_post_is_never_sent_on_as_a_get(status: int) -> None:
    with serving() as server:
        server.answer = lambda _: (status, {"Location": "/elsewhere?api_key=planted"}, b"")
        with pytest.raises(ServiceError, match=f"answered {status} .* redirects to /elsewhere.api_key=.{{3}};"):
            source(server).scores([rollout(1, "x")])
    assert server.paths == ["/score"], "asked once, not tried again and not followed"


@pytest.mark.parametrize("status", [307, 308])
def test_a_post_is_sent_on_whole_within_one_origin_and_not_beyond(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_TEST_TOKEN", "planted-token")
    with serving() as server, serving() as other:
        made = source(server, token_env="REWARD_TEST_TOKEN")
        moved = (status, {"Location": "/moved"}, b"")
        server.answer = lambda asked: moved if server.paths[-1] == "/score" else rewards_by_length(asked)
        assert made.scores([rollout(1, "abc")]) == [3.0]
        assert server.paths == ["/score", "/moved"] and server.asked[0] == server.asked[1]
        assert server.headers[1]["Authorization"] == "Bearer planted-token"
        server.answer = lambda _: (status, {"Location": f"{other.url}/score"}, b"")
        with pytest.raises(ServiceError, match="within one origin"):
            made.scores([rollout(1, "abc")])
        server.answer = lambda _: (status, {"Location": "/score"}, b"")
        with pytest.raises(ServiceError, match="redirects to /score"):
            made.scores([rollout(1, "abc")])
    assert other.asked == []


def test_an_answer_without_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_BYTES", 1 << 20)
    with serving(lambda _: b" " * (3 << 20)) as server, pytest.raises(RewardError, match="answered more than 1 MiB"):
        source(server, retries=0).scores([rollout(1, "x")])


def test_what_a_service_repeats_of_the_credentials_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_TEST_TOKEN", "planted-token")
    with serving(lambda _: (403, {}, b"planted-token is not allowed")) as server:
        made = source(server, token_env="REWARD_TEST_TOKEN")
        with pytest.raises(RewardError, match=r"403 Forbidden \(\*\*\* is not allowed\)"):
            made.scores([rollout(1, "x")])
