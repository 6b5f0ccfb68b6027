"""Calls under way: a verdict ends the call it is about, and harms none that is over."""

from __future__ import annotations

import asyncio
import traceback

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from asyncrlhf.cluster.calls import Call, keep_calls
from asyncrlhf.cluster.handles import within
from asyncrlhf.cluster.ray_calls import ask, translated
from asyncrlhf.errors import ConfigError, RefusedStartError, ReplicaError, RewardError, failure_sentence


def test_a_verdict_ends_a_call_and_none_that_is_over() -> None:
    async def asked() -> None:
        table, answer = keep_calls(), asyncio.get_running_loop().create_future()
        waits = asyncio.create_task(within(60.0, "generator-0", "load", answer))
        await asyncio.sleep(0)
        call: Call = table.of("generator-0")[0]
        call.end("generator-0 gave no sign of life")
        call.end("a second verdict")
        with pytest.raises(ReplicaError, match="no sign of life"):
            await waits
        call.end("a verdict that comes too late")
        assert call.verdict == "generator-0 gave no sign of life" and not table.of("generator-0")

    asyncio.run(asked())


def test_a_verdict_that_comes_after_the_answer_changes_nothing() -> None:
    async def asked() -> None:
        table, answer = keep_calls(), asyncio.get_running_loop().create_future()
        waits = asyncio.create_task(within(60.0, "generator-0", "load", answer))
        await asyncio.sleep(0)
        call = table.of("generator-0")[0]
        answer.set_result(7)
        assert await waits == 7
        call.end("generator-0 gave no sign of life")
        assert not call.verdict

    asyncio.run(asked())


@pytest.mark.parametrize(
    ("raised", "sentence"),
    [
        (RuntimeError("can't start new thread\nmore"), "RuntimeError: can't start new thread (in reward-0)"),
        (RewardError("the judge answers nonsense"), "the judge answers nonsense"),
    ],
)
def test_the_sentence_of_a_run_names_the_actor_that_raised_what_is_not_ours(raised: Exception, sentence: str) -> None:
    async def asked() -> None:
        keep_calls()
        answer = asyncio.get_running_loop().create_future()
        answer.set_exception(RayTaskError("score", "a traceback", raised))
        with pytest.raises(type(raised)) as caught:
            await ask("reward-0", answer, 60.0, "score")
        assert failure_sentence(caught.value) == sentence

    asyncio.run(asked())


def test_what_a_part_refuses_at_its_start_is_the_users_sentence() -> None:
    """A model that the engine cannot pass right ends the run with exit code 2, like any wrong setting."""
    said = "generator.engine=hf cannot run XForCausalLM: it is never right; choose another model."
    for error, kind, code in ((ConfigError(said), RefusedStartError, 2), (RuntimeError(said), ReplicaError, 1)):
        trace = "Traceback (most recent call last):\n" + "".join(traceback.format_exception(error))
        found = translated("generator-0", ActorDiedError(cause=RayTaskError("__init__", trace, error)))
        assert type(found) is kind and isinstance(found, ReplicaError) and found.exit_code == code
        assert said in str(found) and ("could not start" in str(found)) == (code == 1)
