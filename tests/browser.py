"""Debian's chromium, headless, driven over its DevTools protocol: what a page draws, and what it complains of.

Commands and answers pass through two pipes (file descriptors 3 and 4 of chromium), which needs no port and no library;
chromium ends by itself when the pipes close, even where the tests are killed.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--no-first-run",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)
PATIENCE = 60.0  # seconds for one answer; a machine under load starts chromium slowly


class Browser:
    """One chromium with one tab. ``errors``: what the console, exceptions and the log said since ``open``;
    ``requests``: addresses that the page asked for outside of itself. Not thread-safe."""

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "chromium", CHROMIUM, *FLAGS,
             f"--user-data-dir={self._profile}", "about:blank"],
            pass_fds=(theirs_in, theirs_out), start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._unread, self._count, self._session = b"", 0, ""
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        try:
            target = self._call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self._call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def open(self, page: Path, width: int, height: int = 1000) -> None:
        """Load a file into a viewport of ``width`` times ``height`` pixels."""
        self.resize(width, height)
        self.errors.clear()
        self.requests.clear()
        self._loaded = False
        self._call("Page.navigate", url=page.resolve().as_uri())
        self._until(lambda: self._loaded)

    def resize(self, width: int, height: int = 1000) -> None:
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression, awaited where it is a promise. Raises RuntimeError for an exception."""
        answer = self._call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:2000])
        return answer["result"].get("value")

    def wait_for(self, script: str) -> None:
        """Until the expression is true; looks again at each frame of the page."""
        look = f"const look = () => ({script}) ? resolve(true) : setTimeout(look, 10); look();"
        self.evaluate(f"new Promise(resolve => {{ {look} }})")

    def screenshot(self, path: Path, whole: bool = True) -> Path:
        data = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))
        return path

    def close(self) -> None:
        """End chromium with all of its processes, whatever state it is in."""
        os.close(self._out)  # it ends when its pipe does
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(timeout=10)
        os.close(self._in)
        shutil.rmtree(self._profile, ignore_errors=True)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        answer: dict[str, Any] = {}

        def answered() -> bool:
            return bool(answer)

        self._until(answered, wanted=self._count, into=answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return dict(answer["result"])

    def _until(self, done: Callable[[], bool], wanted: int = 0, into: dict[str, Any] | None = None) -> None:
        """Read what chromium says until ``done``; the answer to the call ``wanted`` is put ``into`` a dictionary."""
        deadline = time.monotonic() + PATIENCE
        while not done():
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._in, 1 << 20) if ready else b""
            if not data:
                raise RuntimeError("chromium ended" if ready else f"chromium was silent for {PATIENCE:g} s")
            *messages, self._unread = (self._unread + data).split(b"\0")
            for message in map(json.loads, messages):
                if message.get("id") == wanted and into is not None:
                    into.update(message)
                self._notice(message)

    def _notice(self, event: dict[str, Any]) -> None:
        method, what = event.get("method"), event.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(what["exceptionDetails"])[:500])
        elif method == "Runtime.consoleAPICalled" and what["type"] in ("error", "assert", "warning"):
            self.errors.append(" ".join(str(a.get("value", a.get("description"))) for a in what["args"]))
        elif method == "Log.entryAdded" and what["entry"]["level"] in ("error", "warning"):
            self.errors.append(what["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            address = what["request"]["url"]
            if not address.startswith(("file:", "data:", "blob:")):
                self.requests.append(address)
