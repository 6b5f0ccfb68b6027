"""Agents for tests of the endpoint. As a program (``python -m tests.agents NAME``) one plays in its own process."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from openai import APITimeoutError, OpenAI

Row = Mapping[str, Any]
RELAY: dict[str, Callable[[str, str, Row], Any]] = {}  # the agent of a test that is running


async def relay(base_url: str, api_key: str, row: Row) -> Any:
    return await RELAY["agent"](base_url, api_key, row)


def sums(base_url: str, api_key: str, row: Row) -> float:
    """Asks for the row's sum, and then for another one; the share of right answers."""
    client = OpenAI(base_url=base_url, api_key=api_key)
    prompt, right = str(row["prompt"]), 0
    for number in range(2):
        text = client.completions.create(model="any", prompt=prompt, max_tokens=12).choices[0].text
        right += text.strip() == (str(row["answer"]) if number == 0 else "5")
        prompt += text + "2+3="
    return right / 2


def branches(base_url: str, api_key: str, row: Row) -> float:
    """Asks a sub-agent between its own two questions, and then goes on with a part of what was said."""
    client = OpenAI(base_url=base_url, api_key=api_key)

    def said(prompt: str) -> str:
        return client.completions.create(model="any", prompt=prompt, max_tokens=6).choices[0].text

    main = str(row["prompt"])
    main += said(main)
    sub = "12+30="
    sub += said(sub) + " "
    sub += said(sub)
    main += f" {sub[-3:]} 2+3="
    main += said(main)
    return float(said(main[-9:]).strip().startswith("5"))


def fails(base_url: str, api_key: str, row: Row) -> None:
    raise RuntimeError(f"no such file, key {api_key}")


def asks_and_hangs(base_url: str, api_key: str, row: Row) -> None:
    OpenAI(base_url=base_url, api_key=api_key).completions.create(model="any", prompt="1+1=")
    time.sleep(5.0)


def hangs(base_url: str, api_key: str, row: Row) -> None:
    time.sleep(5.0)


def idles(base_url: str, api_key: str, row: Row) -> float:
    return 1.0


def sometimes(base_url: str, api_key: str, row: Row) -> None:
    """Fails, hangs or ends while a call is under way, or plays, as the episode's seed says."""
    kind = int(row["seed"]) % 4
    if kind == 0:
        raise RuntimeError("no luck")
    if kind == 1:
        asks_and_hangs(base_url, api_key, row)
    if kind == 2:
        client = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        text = client.completions.create(model="any", prompt="1+1=").choices[0].text
        with suppress(APITimeoutError):
            client.with_options(timeout=1e-3).completions.create(model="any", prompt=f"1+1={text}2+2=")
        return
    sums(base_url, api_key, row)


def greedy(base_url: str, api_key: str, row: Row) -> None:
    """Asks until it is refused, and knows no better than to fail then."""
    client, prompt = OpenAI(base_url=base_url, api_key=api_key), "1+1="
    while True:
        prompt += client.completions.create(model="any", prompt=prompt, max_tokens=8).choices[0].text + "."


if __name__ == "__main__":
    played: Callable[[str, str, Row], Any] = globals()[sys.argv[1]]
    given = json.loads(os.environ["ASYNCRLHF_ROW"])
    reward = played(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], given)
    print("played")
    print(json.dumps({"reward": reward}))
