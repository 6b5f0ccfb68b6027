"""The endpoint of a worker's agents: HTTP on the episodes' own loop, in OpenAI's protocol, with a key an episode."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from typing import Any

from aiohttp import web

from asyncrlhf.episodes.agents.answers import Pieces, models, refused, streamed, whole
from asyncrlhf.episodes.agents.calls import RefusalError, read_call
from asyncrlhf.episodes.agents.session import OVER, Session
from asyncrlhf.errors import ConfigError

ANY_ADDRESS = ("0.0.0.0", "::")
MOST_BYTES = 2**26  # of a call's body
CLOSE_SECONDS = 1.0  # for answers that are being sent


class Endpoint:
    """Passes each call to the episode of its key. Keys are random, and signed by this endpoint, so that those of
    episodes that have ended need not be remembered.

    ``pieces``: the text of each token; ``refuse``: whether sampling settings other than the run's are refused.
    """

    def __init__(self, host: str, pieces: Pieces, refuse: bool) -> None:
        self._host = host
        self._pieces = pieces
        self._refuse = refuse
        self._secret = secrets.token_bytes()
        self._sessions: dict[str, Session] = {}
        self._runner: web.AppRunner | None = None
        self.base_url = ""

    async def open(self, address: str) -> None:
        """Listen at a free port. ``address``: of this machine, for agents elsewhere, if the endpoint listens at all
        addresses."""
        app = web.Application(client_max_size=MOST_BYTES)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completion)
        app.router.add_get("/v1/models", self._models)
        app.router.add_route("*", "/{rest:.*}", self._unknown)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=CLOSE_SECONDS)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, 0).start()
        except OSError as error:
            said = f"{error.strerror or error}".rstrip(".")
            raise ConfigError(
                f"episode.endpoint_host={self._host} is no address at which this machine can listen: {said}."
            ) from error
        port = self._runner.addresses[0][1]
        host = address if self._host in ANY_ADDRESS else self._host
        self.base_url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def admit(self, session: Session) -> str:
        """The key of a session, whose calls are answered until it is dismissed."""
        word = secrets.token_urlsafe(24)
        key = word + self._signature(word)
        self._sessions[key] = session
        return key

    def dismiss(self, key: str) -> None:
        self._sessions.pop(key, None)

    def _signature(self, word: str) -> str:
        return hmac.new(self._secret, word.encode(), hashlib.sha256).hexdigest()[:_SIGNED]

    def _session(self, request: web.Request) -> Session:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if (session := self._sessions.get(key)) is not None:
            return session
        if hmac.compare_digest(self._signature(key[:-_SIGNED]).encode(), key[-_SIGNED:].encode()):
            raise RefusalError(OVER, "episode_over", 410)
        raise RefusalError("The API key is unknown; allowed: the api_key that the agent was given.", "unknown_key", 401)

    async def _chat(self, request: web.Request) -> web.Response:
        return await self._answered(request, chat=True)

    async def _completion(self, request: web.Request) -> web.Response:
        return await self._answered(request, chat=False)

    async def _answered(self, request: web.Request, chat: bool) -> web.Response:
        try:
            session = self._session(request)
            call = read_call(await _json(request), chat, session.request.sampling, self._refuse)
            answer = await session.answer(call, request.headers.get("x-stainless-retry-count", "0") != "0")
        except RefusalError as error:
            return _refusal(error)
        answer.delivered = request.transport is not None and not request.transport.is_closing()
        if call.stream:
            return web.Response(body=streamed(call, answer, self._pieces), content_type="text/event-stream")
        return web.Response(body=whole(call, answer, self._pieces), content_type="application/json")

    async def _models(self, request: web.Request) -> web.Response:
        try:
            self._session(request)
        except RefusalError as error:
            return _refusal(error)
        return web.Response(body=models(), content_type="application/json")

    async def _unknown(self, request: web.Request) -> web.Response:
        return _refusal(
            RefusalError(
                f"There is no {request.method} {request.path[:60]}; allowed: POST /v1/chat/completions, "
                "POST /v1/completions and GET /v1/models.",
                "not_found",
                404,
            )
        )


_SIGNED = 32  # characters of a key's signature


def _refusal(error: RefusalError) -> web.Response:
    return web.Response(body=refused(error), status=error.status, content_type="application/json")


async def _json(request: web.Request) -> Any:
    try:
        return json.loads(await request.read())
    except web.HTTPRequestEntityTooLarge:
        raise RefusalError(f"The body is longer than {MOST_BYTES} bytes.", "too_large", 413) from None
    except (ValueError, RecursionError):
        raise RefusalError("The body is no JSON.") from None
