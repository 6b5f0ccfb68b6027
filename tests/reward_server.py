"""A reward endpoint in a thread of the test: answers by a rule, and can hang, talk nonsense or die at will."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[dict[str, Any]], Any]


def rewards_by_length(asked: dict[str, Any]) -> Any:
    return {"rewards": [float(len(completion)) for completion in asked["completions"]]}


class _QuietServer(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever lost patience is gone before the answer; what else fails is told as ever."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class Server:
    """``answer`` makes the JSON document of the reply; or raw bytes, or a (status, headers, document) triple.

    ``asked`` holds every request's document, ``paths`` and ``headers`` its path and headers.
    """

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.release = threading.Event()  # ends a handler that waits for it
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                document = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.asked.append(document)
                server.paths.append(self.path)
                server.headers.append(dict(self.headers))
                reply = server.answer(document)
                status, headers, body = reply if isinstance(reply, tuple) else (200, {}, reply)
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                for name, value in {"Content-Length": str(len(data)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                """Nothing on the screen."""

        self._http = _QuietServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._http.block_on_close = False
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def hang(self, _: dict[str, Any]) -> Any:
        """An answer that comes when the test is over."""
        self.release.wait(120)
        return {"rewards": []}

    def die(self) -> None:
        """Close the port: whoever comes from now on is refused."""
        self.release.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(10)


@contextmanager
def serving(answer: Answer = rewards_by_length) -> Iterator[Server]:
    server = Server(answer)
    try:
        yield server
    finally:
        server.die()
