"""The model endpoint that agents speak to: HTTP on the controller's event loop.

    agent ── POST /v1/chat/completions, /v1/messages, /v1/responses ──► key? ─► body ─► session.begin ─► answer, or its stream
             GET  /v1/models    POST /v1/reward {"reward": 1.0}          401       400

The key of a session opens that session and nothing else; it comes as `Authorization: Bearer KEY`, as `x-api-key: KEY`, or in
the path, `/s/KEY/v1/…`. While an answer takes long, its connection is kept alive by a space or a comment each KEEP_ALIVE_S.
"""

import asyncio
import hashlib
import json
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from megarl.core.base.contracts import Policy
from megarl.core.base.tokenizer import Tokenizer
from megarl.core.base.types import JsonObject
from megarl.core.recipe import Recipe
from megarl.tasks.agents.anthropic_messages import AnthropicMessages
from megarl.tasks.agents.chat_completions import ChatCompletions
from megarl.tasks.agents.messages import LARGEST_BODY, AgentRequest, WireError
from megarl.tasks.agents.rendering import Rendering
from megarl.tasks.agents.responses import Responses
from megarl.tasks.agents.session import AgentSession, PendingTurn, ServedTurn
from megarl.tasks.agents.tree import SessionTree
from megarl.tasks.agents.wire import WireProtocol

log = logging.getLogger(__name__)
MODEL = "policy"
"""The name of the one model that is served."""
BODY_LIMIT_S = 60.0
"""Limit of the time in which a request's body arrives, or a part of an answer is taken."""
KEEP_ALIVE_S = 15.0


CHAT, MESSAGES = ChatCompletions(), AnthropicMessages()
PROTOCOLS: tuple[WireProtocol, ...] = (CHAT, MESSAGES, Responses())


class Gateway:
    """Serves sessions on `host` from `start` to `close`. url: where, without /v1."""

    def __init__(self, host: str) -> None:
        self._host, self.url = host, ""
        self._sessions: dict[str, AgentSession] = {}
        self._ignored = set[tuple[str, str]]()
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=LARGEST_BODY)
        for prefix in ("", "/s/{key}"):
            for protocol in PROTOCOLS:
                app.router.add_post(prefix + protocol.path, self._handler(protocol, self._answer))
            app.router.add_post(f"{prefix}{MESSAGES.path}/count_tokens", self._handler(MESSAGES, self._count))
            app.router.add_post(prefix + "/v1/reward", self._handler(CHAT, self._reward))
            app.router.add_get(prefix + "/v1/models", self._handler(CHAT, self._models))
            app.router.add_get(prefix + "/v1/models/{model}", self._handler(CHAT, self._models))
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, 0)
        await site.start()
        self.url = f"http://{self._host}:{self._runner.addresses[0][1]}"
        log.info("agents find the policy at %s/v1", self.url)

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @asynccontextmanager
    async def session(
        self, recipe: Recipe, tokenizer: Tokenizer, rendering: Rendering, policy: Policy
    ) -> AsyncIterator[AgentSession]:
        """Serve a session for the time of the block."""
        session = AgentSession(recipe, tokenizer, rendering, policy)
        self._sessions[session.key] = session
        try:
            yield session
        finally:
            del self._sessions[session.key]
            session.end("the agent has ended")

    def _handler(
        self, protocol: WireProtocol, serve: Callable[[web.Request, WireProtocol, AgentSession], Any]
    ) -> Callable[[web.Request], Any]:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                response: web.StreamResponse = await serve(request, protocol, self._opened(request))
                return response
            except WireError as error:
                return web.json_response(protocol.error(error), status=error.status)

        return handle

    def _opened(self, request: web.Request) -> AgentSession:
        """Return the session that the request's key opens, before anything of its body is read."""
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        for key in (request.match_info.get("key", ""), bearer, request.headers.get("x-api-key", "")):
            if key in self._sessions:
                return self._sessions[key]
        raise WireError(
            401, "no session has this key; use the one in OPENAI_API_KEY or ANTHROPIC_API_KEY", "invalid_api_key"
        )

    async def _models(self, request: web.Request, protocol: WireProtocol, _session: AgentSession) -> web.Response:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "megarl"}
        named = request.match_info.get("model")
        if named not in (None, MODEL):
            raise _unknown(named)
        return web.json_response(model if named else {"object": "list", "data": [model]})

    async def _reward(self, request: web.Request, protocol: WireProtocol, session: AgentSession) -> web.Response:
        """Take a reward of the session."""
        _, body = await _read(request, protocol)
        reward = body.get("reward")
        if isinstance(reward, bool):
            reward = 1.0 if reward else -1.0
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            raise WireError(400, f"reward: should be a finite number, or true or false, got {reward!r:.80}")
        session.post(float(reward))
        return web.json_response({"reward": float(reward)})

    async def _count(self, request: web.Request, protocol: WireProtocol, session: AgentSession) -> web.Response:
        """Tell the length of a request's prompt, as it would be sent."""
        _, body = await _read(request, protocol)
        session.check()
        return web.json_response({"input_tokens": await session.prompt_tokens(_asked(protocol, body, session))})

    async def _answer(self, request: web.Request, protocol: WireProtocol, session: AgentSession) -> web.StreamResponse:
        data, body = await _read(request, protocol)
        session.check()
        asked = _asked(protocol, body, session)
        for field in protocol.ignored(body):
            if (protocol.path, field) not in self._ignored:
                self._ignored.add((protocol.path, field))
                log.info("agents' field %r is ignored (%s)", field, protocol.path)
        digest = hashlib.sha256(data + protocol.path.encode()).digest()
        retried = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
        generation = session.begin(asked, digest, retried, lambda: _is_open(request))
        return await _WireReply(request, protocol, body, generation, asked.stream).write(session.tree)


class _WireReply:
    """Writes one answer, as a body or a stream, when its generation is done; until then it keeps the connection alive."""

    def __init__(
        self,
        request: web.Request,
        protocol: WireProtocol,
        body: JsonObject,
        generation: PendingTurn,
        stream: bool,
    ) -> None:
        self._request, self._protocol, self._body = request, protocol, body
        self._generation, self._stream = generation, stream
        kind = "text/event-stream" if stream else "application/json"
        self._response = web.StreamResponse(headers={"Content-Type": kind, "Cache-Control": "no-cache"})

    async def write(self, tree: SessionTree) -> web.StreamResponse:
        """Return the response when all of it is sent. WireError only before its first byte."""
        await self._generation.placed.wait()
        if self._stream and not self._generation.done.done():
            await self._begin()
        while not (await asyncio.wait({self._generation.done}, timeout=KEEP_ALIVE_S))[0]:
            await self._begin()
            await self._send(self._response.write(b": the policy writes\n\n" if self._stream else b" "))
        try:
            turn = self._result()
        except WireError:
            if not self._response.prepared:
                raise
            if self._request.transport is not None:
                self._request.transport.close()  # too late for another status
            return self._response
        await self._begin()
        await self._send(self._response.write_eof(self._answer(turn)))
        tree.deliver(turn.node)  # not asked whether it is still open: a client that has got all of it may close
        return self._response

    def _result(self) -> ServedTurn:
        if self._generation.done.cancelled():
            raise WireError(400, "the session is over", "session_over")
        return self._generation.done.result()

    def _answer(self, turn: ServedTurn) -> bytes:
        if not self._stream:
            return json.dumps(self._protocol.reply(self._body, turn), ensure_ascii=False).encode(errors="replace")
        parts = []
        for name, data in self._protocol.events(self._body, turn):
            text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
            parts.append(f"{f'event: {name}{chr(10)}' if name else ''}data: {text}\n\n")
        return "".join(parts).encode(errors="replace")

    async def _begin(self) -> None:
        if not self._response.prepared:
            await self._response.prepare(self._request)

    async def _send(self, writing: Awaitable[None]) -> None:
        """Wait until a part is written. A client that has gone, or does not read, ends its request, which is not trained."""
        try:
            async with asyncio.timeout(BODY_LIMIT_S):
                await writing
        except TimeoutError:
            raise ConnectionResetError("the agent does not read its answer") from None


def _is_open(request: web.Request) -> bool:
    return request.transport is not None and not request.transport.is_closing()


def _asked(protocol: WireProtocol, body: JsonObject, session: AgentSession) -> AgentRequest:
    model, asked = protocol.request(body, session.known)
    if model != MODEL:
        raise _unknown(model)
    return asked


def _unknown(model: str | None) -> WireError:
    return WireError(404, f"the model {model!r} does not exist; there is {MODEL!r} alone", "model_not_found")


async def _read(request: web.Request, protocol: WireProtocol) -> tuple[bytes, JsonObject]:
    """Return a request's body and its fields. WireError if it is none, too long or too slow."""
    try:
        async with asyncio.timeout(BODY_LIMIT_S):
            data = await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise WireError(413, f"the body is longer than {LARGEST_BODY:,} bytes", "too_large") from None
    except TimeoutError:
        raise WireError(408, f"the body did not arrive within {BODY_LIMIT_S:g} s", "timeout") from None
    return data, protocol.parse(data)
