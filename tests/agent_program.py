"""An agent as a program without a client library: ``python -m tests.agent_program NAME``, in an episode's process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request


def complete(prompt: str) -> str:
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/completions",
        json.dumps({"model": "any", "prompt": prompt, "max_tokens": 12}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def sums() -> None:
    """Asks for the row's sum, and then for another one; the share of right answers is the reward."""
    row = json.loads(os.environ["ASYNCRLHF_ROW"])
    prompt = str(row["prompt"])
    first = complete(prompt)
    second = complete(f"{prompt}{first}2+3=")
    print("played")
    print(json.dumps({"reward": ((first.strip() == str(row["answer"])) + (second.strip() == "5")) / 2}))


def fails() -> None:
    raise RuntimeError(f"no such file, key {os.environ['OPENAI_API_KEY']}")


def hangs() -> None:
    time.sleep(20.0)


def leaves() -> None:
    """Ends at once, but for a process that holds its output open."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(20)"])


if __name__ == "__main__":
    globals()[sys.argv[1]]()
