"""The program that plays tasks of verifiers by an OpenAI-compatible endpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from asyncrlhf.episodes.adapters import verifiers_program
from asyncrlhf.episodes.adapters.verifiers_program import LOCAL, with_defaults

ROOT = Path(__file__).resolve().parents[3]
# The interpreter of an environment with verifiers 0.4: python -m venv FOLDER; FOLDER/bin/pip install verifiers==0.4.0.
PYTHON = os.environ.get("VERIFIERS_PYTHON", "")


def test_what_is_given_of_a_config_replaces_its_defaults() -> None:
    given = {"taskset": {"most": 3}, "agent": {"max_turns": 2, "harness": {"id": "bash"}}, "timeout": {"episode": 9}}
    assert with_defaults(given, {"taskset": {"id": "sums"}, "agent": LOCAL}) == {
        "taskset": {"id": "sums", "most": 3},
        "agent": {"harness": {"id": "bash"}, "runtime": {"type": "subprocess"}, "max_turns": 2},
        "timeout": {"episode": 9},
    }
    assert with_defaults({}, {"a": 1, "b": {"c": 2}}) == {"a": 1, "b": {"c": 2}}


class Asked(BaseHTTPRequestHandler):
    """Answers 4 to everything, as a stream."""

    seen: list[tuple[str, Any]] = []  # noqa: RUF012  of the one server of a test

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.seen.append((str(self.headers["authorization"]), body))
        head = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "policy"}
        told = {"index": 0, "delta": {"role": "assistant", "content": "4"}, "finish_reason": None}
        last = {"index": 0, "delta": {}, "finish_reason": "stop"}
        events = [json.dumps({**head, "choices": [choice]}) for choice in (told, last)]
        out = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]).encode()
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("content-length", str(len(out)))
        self.end_headers()
        self.wfile.write(out)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Asked)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.thorough
def test_a_task_is_played_and_scored(endpoint: str, tmp_path: Path) -> None:
    if not PYTHON:
        pytest.skip("verifiers is not installed; VERIFIERS_PYTHON names the interpreter of an environment that has it")

    def played(*arguments: str, **row: int) -> subprocess.CompletedProcess[str]:
        told = {"OPENAI_BASE_URL": endpoint, "OPENAI_API_KEY": "key7", "ASYNCRLHF_ROW": json.dumps(row)}
        paths = {"PYTHONPATH": str(ROOT / "tests/verifiers_tasks"), "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}"}
        paths["TMPDIR"] = str(tmp_path)  # of uv, which leaves a lock there
        command = [PYTHON, verifiers_program.__file__, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=200, env={**os.environ, **told, **paths})

    right, wrong = played("sums_taskset", index=2), played("sums_taskset", '{"taskset": {"most": 2}}', seed=7, index=1)
    assert json.loads(right.stdout.splitlines()[-1]) == {"reward": 1.0}, right.stderr
    assert json.loads(wrong.stdout.splitlines()[-1]) == {"reward": 0.0}, wrong.stderr
    asked = [(key, body["messages"][-1]["content"]) for key, body in Asked.seen]
    assert asked == [("Bearer key7", "2+2="), ("Bearer key7", "1+1=")]
    missing = played("no_such_taskset")
    assert missing.returncode != 0 and "'no_such_taskset' not found" in missing.stderr.splitlines()[-1]
