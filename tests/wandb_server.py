"""A W&B server for tests: answers `wandb sync` and online runs, and keeps what they send as W&B's own would."""

from __future__ import annotations

import gzip
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "a" * 40


class WandbServer:
    """``runs``: per run id the variables of its creation, merged; ``history``: its rows by their line number.

    ``kill`` makes it unreachable, as a network that fails.
    """

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        self.history: dict[str, dict[int, dict[str, Any]]] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()
        self.alive = True

    @property
    def environment(self) -> dict[str, str]:
        return {"WANDB_BASE_URL": f"http://127.0.0.1:{self._server.server_port}", "WANDB_API_KEY": KEY}

    def kill(self) -> None:
        if self.alive:
            self.alive = False
            self._server.shutdown()
            self._server.server_close()

    def answer(self, operation: str, values: dict[str, Any]) -> dict[str, Any]:
        run_id = values.get("name") or ""
        project = {"id": "p", "name": values.get("project") or "asyncrlhf", "entity": {"id": "e", "name": "me"}}
        if operation == "UpsertBucket":
            known = run_id in self.runs
            self.runs.setdefault(run_id, {}).update({key: v for key, v in values.items() if v is not None})
            bucket = {"id": run_id, "name": run_id, "displayName": run_id, "config": "{}", "project": project}
            return {"upsertBucket": {"bucket": bucket, "inserted": not known}}
        if operation == "RunResumeStatus":
            return {"model": {"id": "p", **project, "bucket": self._resumed(run_id)}}
        if operation == "CreateArtifact":
            made = {"id": "a", "state": "COMMITTED", "artifactSequence": {"id": "s", "latestArtifact": None}}
            return {"createArtifact": {"artifact": made}}
        if operation == "CreateRunFiles":
            return {"createRunFiles": {"runID": "x", "uploadHeaders": [], "files": []}}
        return {"viewer": {"id": "v", "entity": "me", "flags": "{}"}, "project": {"artifact": None}}

    def _resumed(self, run_id: str) -> dict[str, Any] | None:
        if run_id not in self.runs:
            return None
        rows = self.history.get(run_id, {})
        last = rows[max(rows)] if rows else {}
        return {
            "id": run_id, "name": run_id, "displayName": run_id, "config": "{}", "summaryMetrics": json.dumps(last),
            "historyLineCount": len(rows), "eventsLineCount": 0, "logLineCount": 0, "eventsTail": "[]", "tags": [],
            "historyTail": json.dumps([json.dumps(last)] if rows else []), "wandbConfig": json.dumps({"t": {}}),
        }  # fmt: skip

    def stream(self, run_id: str, files: dict[str, Any]) -> None:
        """Lines of a run's files: each is written at its number, over what was there."""
        sent = files.get("wandb-history.jsonl")
        for number, line in enumerate(sent["content"] if sent else (), sent["offset"] if sent else 0):
            self.history.setdefault(run_id, {})[number] = json.loads(line)


def _handler(server: WandbServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            answer: dict[str, Any] = {}
            if not server.alive:
                self.close_connection = True
                return
            if self.path == "/graphql":
                asked = json.loads(body)
                answer = {"data": server.answer(asked.get("operationName", ""), asked.get("variables") or {})}
            elif self.path.endswith("/file_stream"):
                server.stream(self.path.split("/")[-2], json.loads(body).get("files") or {})
            out = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(out)))
            self.end_headers()
            self.wfile.write(out)

        do_GET = do_PUT = do_POST

        def log_message(self, *_: Any) -> None: ...

    return Handler
