"""The model endpoint that agents talk to: an HTTP server on the controller's event
loop.

    agent ── POST /v1/chat/completions ──► key? ─► body ─► session.start ─► answer, or
                  /v1/messages              401     400                     its stream
                  /v1/responses
                  /v1/reward {"reward": 1.0}
             GET  /v1/models

A session has one key for requests and one for rewards, so that programs of the policy,
which find the first in the environment, cannot reward themselves. Clients send a key as
`Authorization: Bearer KEY`, as `x-api-key: KEY`, or in the path, `/s/KEY/v1/…`. While
the policy generates, a space or a comment every KEEP_ALIVE_S keeps the connection
alive. A request's bytes count against its session's and everybody's ByteBudget until
its prompt has been rendered.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from megarl.core.base.contracts import Policy
from megarl.core.base.tokenizer import Tokenizer
from megarl.core.base.types import JsonObject
from megarl.core.recipe import Recipe
from megarl.tasks.agents.anthropic_messages import AnthropicMessages
from megarl.tasks.agents.bounds import IN_FLIGHT, LARGEST_REWARD, ByteBudget
from megarl.tasks.agents.chat_completions import ChatCompletions
from megarl.tasks.agents.errors import WireError, session_over
from megarl.tasks.agents.forms import in_words, refuse_forms
from megarl.tasks.agents.inside import PORT
from megarl.tasks.agents.messages import AgentRequest
from megarl.tasks.agents.rendering import Rendering
from megarl.tasks.agents.responses import Responses
from megarl.tasks.agents.session import AgentSession, PendingTurn, ServedTurn
from megarl.tasks.agents.wire import WireProtocol
from megarl.tasks.graders.scratch import scratch

log = logging.getLogger(__name__)
MODEL = "policy"
"""The name of the only model that is served."""
BODY_LIMIT_S = 60.0
"""Seconds within which a request's body must arrive, and a client must accept each part
of an answer.
"""
KEEP_ALIVE_S = 15.0

CHAT = ChatCompletions()
MESSAGES = AnthropicMessages()
PROTOCOLS: tuple[WireProtocol, ...] = (CHAT, MESSAGES, Responses())


class Gateway:
    """Serves sessions from `start` to `close`: on `host` or, if that is empty, on a
    socket in the file system, to which sandboxes forward a port of their own.

    url: the server's address for an agent, without /v1. socket: the socket's path.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self.url = ""
        self.socket: Path | None = None
        self._folder = contextlib.ExitStack()
        self._sessions: dict[str, AgentSession] = {}
        self._sessions_by_reward_key: dict[str, AgentSession] = {}
        self._ignored = set[tuple[str, str]]()
        self._has_warned = False
        self._budget = ByteBudget(IN_FLIGHT)
        app = web.Application(middlewares=[_unknown_routes])
        for prefix in ("", "/s/{key}"):
            for protocol in PROTOCOLS:
                app.router.add_post(prefix + protocol.path, self._handler(protocol, self._answer))
            app.router.add_post(
                f"{prefix}{MESSAGES.path}/count_tokens", self._handler(MESSAGES, self._count)
            )
            app.router.add_post(prefix + "/v1/reward", self._handler(CHAT, self._reward))
            app.router.add_get(prefix + "/v1/models", self._handler(CHAT, self._models))
            app.router.add_get(prefix + "/v1/models/{model}", self._handler(CHAT, self._models))
        self._runner = web.AppRunner(
            app, access_log=None, logger=_server_log(), shutdown_timeout=1.0
        )

    async def start(self) -> "Gateway":
        """Start to listen; return this gateway."""
        await self._runner.setup()
        if self._host:
            await web.TCPSite(self._runner, self._host, 0).start()
            self.url = f"http://{self._host}:{self._runner.addresses[0][1]}"
        else:
            folder = self._folder.enter_context(scratch())
            self.socket = folder / "socket"
            await web.SockSite(self._runner, _listening(self.socket)).start()
            self.url = f"http://127.0.0.1:{PORT}"
        log.info("agents find the policy at %s/v1", self.url)
        return self

    async def close(self) -> None:
        """End the sessions that are still open, and stop to listen."""
        for session in self._sessions.values():
            session.end("the run ends")
        await self._runner.cleanup()
        self._folder.close()

    @asynccontextmanager
    async def session(
        self, recipe: Recipe, tokenizer: Tokenizer, rendering: Rendering, policy: Policy
    ) -> AsyncIterator[AgentSession]:
        """Serve a session while the block runs."""
        session = AgentSession(recipe, tokenizer, rendering, policy)
        self._sessions[session.key] = self._sessions_by_reward_key[session.reward_key] = session
        try:
            yield session
        finally:
            del self._sessions[session.key], self._sessions_by_reward_key[session.reward_key]
            session.end("the agent has ended")

    def _handler(
        self,
        protocol: WireProtocol,
        serve: Callable[[web.Request, WireProtocol, AgentSession], Any],
    ) -> Callable[[web.Request], Any]:
        """Return a handler that passes a request with its session to `serve`, one of
        this class's methods. `_reward` needs the key for rewards, others the one for
        requests.
        """
        keys = self._sessions_by_reward_key if serve == self._reward else self._sessions

        async def handle(request: web.Request) -> web.StreamResponse:
            """Serve a request; what is refused is answered in the protocol's form."""
            try:
                session = self._session_of(request, keys)
                return await serve(request, protocol, session)
            except WireError as error:
                return web.json_response(protocol.error(error), status=error.status)
            except web.RequestPayloadError as error:
                return web.json_response(
                    protocol.error(WireError(400, f"the body cannot be read: {error}")), status=400
                )
            except ConnectionError as error:
                log.debug("an agent's request ended before its answer: %r", error)
                return web.Response(status=400)  # which nobody receives

        return handle

    def _session_of(self, request: web.Request, keys: Mapping[str, AgentSession]) -> AgentSession:
        """Return the session that the request's key belongs to. keys: the sessions by
        the keys for requests, or by those for rewards. WireError if none has it.
        """
        path_key = request.match_info.get("key", "")
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        request_keys = (path_key, bearer, request.headers.get("x-api-key", ""))
        for key in request_keys:
            if key in keys:
                return keys[key]
        right_key = "the one in OPENAI_API_KEY or ANTHROPIC_API_KEY"
        if keys is self._sessions_by_reward_key:
            right_key = "`reward_key`, which the agent is given with its task"
            if not self._sessions.keys().isdisjoint(request_keys) and not self._has_warned:
                self._has_warned = True
                log.warning(
                    "a reward was refused, because it came with the key for requests; use %s",
                    right_key,
                )
        raise WireError(401, f"no session has this key; use {right_key}", "invalid_api_key")

    async def _models(
        self, request: web.Request, protocol: WireProtocol, _session: AgentSession
    ) -> web.Response:
        """Answer with the list of models, or with the one that the path names.
        WireError if that is not the policy.
        """
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "megarl"}
        name = request.match_info.get("model")
        if name is None:
            return web.json_response({"object": "list", "data": [model]})
        if name != MODEL:
            raise _unknown_model(name)
        return web.json_response(model)

    async def _reward(
        self, request: web.Request, protocol: WireProtocol, session: AgentSession
    ) -> web.Response:
        """Accept a reward for the session. What is refused is noted there: the agent
        may not have looked at the answer.
        """
        try:
            reward = _reward_of(await _read(request, _check_reward))
        except WireError as error:
            session.refused = str(error)
            raise
        session.post(reward)
        return web.json_response({"reward": reward})

    @asynccontextmanager
    async def _admitted(self, request: web.Request, session: AgentSession) -> AsyncIterator[bytes]:
        """Read a request's body; while the block works on it, it counts against the
        budgets.
        """
        size = session.bounds.body_bytes  # if the request does not say its size
        if request.content_length is not None and "Content-Encoding" not in request.headers:
            size = request.content_length
        session.bounds.check_bytes(size)
        with session.busy():
            async with session.budget.lend(size), self._budget.lend(size):
                yield await _read(request, session.bounds.check_bytes)

    async def _count(
        self, request: web.Request, protocol: WireProtocol, session: AgentSession
    ) -> web.Response:
        """Answer with the number of tokens that the policy would be sent for a
        request.
        """
        async with self._admitted(request, session) as data:
            session.check()
            agent_request = _agent_request(protocol, protocol.parse(data), session)
            return web.json_response({"input_tokens": await session.prompt_tokens(agent_request)})

    async def _answer(
        self, request: web.Request, protocol: WireProtocol, session: AgentSession
    ) -> web.StreamResponse:
        """Answer with the policy's turn, in one piece or as a stream. WireError if
        there is none; once the response has begun, a stream ends with the error
        instead, and any other connection is closed.
        """
        async with self._admitted(request, session) as data:
            pending, body = self._pending_turn(request, protocol, session, data)
            del data  # the answer may take an hour
            await pending.rendered.wait()  # until then its bytes count against the budgets
        await pending.placed.wait()  # what is refused until then gets its own status
        is_stream = bool(body.get("stream"))
        response = await _waited(request, pending, is_stream)
        try:
            if pending.done.cancelled():
                raise session_over(session.over)
            turn = pending.done.result()
        except WireError as error:
            if not response.prepared:
                raise
            if is_stream:
                await _send(request, response, _event(*protocol.error_event(error)), last=True)
            elif request.transport is not None:
                # too late for another status; clients ask again, and get 400
                request.transport.close()
            return response
        protocol.note_answer(turn, session.message_cache)
        await _send(request, response, _written(protocol, body, turn, is_stream), last=True)
        # whether or not the client has closed: it has the whole answer
        session.tree.deliver(turn.node)
        return response

    def _pending_turn(
        self, request: web.Request, protocol: WireProtocol, session: AgentSession, data: bytes
    ) -> tuple[PendingTurn, JsonObject]:
        """Return the generation that answers a request, and the fields of its body
        without the conversation. A request that is sent again gets the generation that
        it began.
        """
        digest = hashlib.sha256(protocol.path.encode())
        digest.update(data)
        # OpenAI's and Anthropic's clients count their retries in this header.
        retried = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")

        def is_open() -> bool:
            """Return whether the client is still connected."""
            return request.transport is not None and not request.transport.is_closing()

        body = protocol.parse(data)
        pending = session.resume(digest.digest(), retried, is_open)
        if pending is None:
            session.check()
            agent_request = _agent_request(protocol, body, session)
            pending = session.start(agent_request, digest.digest(), is_open)
            self._note_ignored(protocol, body)
        # What is still JSON is the conversation, and what nobody reads.
        fields = {name: value for name, value in body.items() if not isinstance(value, msgspec.Raw)}
        return pending, fields

    def _note_ignored(self, protocol: WireProtocol, body: JsonObject) -> None:
        """Log the fields of a body that are ignored, each once."""
        for field in protocol.ignored(body):
            if (protocol.path, field) not in self._ignored:
                self._ignored.add((protocol.path, field))
                log.info("agents' field %r is ignored (%s)", field, protocol.path)


def _listening(path: Path) -> socket.socket:
    """Return a socket at this path, which whoever reaches the path may connect to. The
    path may be longer than the address of a socket.
    """
    listener = socket.socket(socket.AF_UNIX)
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        listener.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)
    path.chmod(0o666)  # its folder is ours alone
    return listener


def _server_log() -> logging.Logger:
    """Return aiohttp's log, in which a malformed request is one line: its traceback
    says nothing of ours.
    """

    def shorten(record: logging.LogRecord) -> bool:
        """Change a record in place, and keep it."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError | web.RequestPayloadError):
            record.msg = "an agent's request is malformed: %s"
            record.args = (" ".join(str(error).split()),)
            record.exc_info = None
            record.levelno = logging.WARNING
            record.levelname = "WARNING"
        return True

    server_log = logging.getLogger(f"{__name__}.http")
    if not server_log.filters:
        server_log.addFilter(shorten)
    return server_log


@web.middleware
async def _unknown_routes(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Say what there is instead of an address or method that there is not."""
    try:
        return await handler(request)
    except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
        paths = ", ".join(protocol.path for protocol in PROTOCOLS)
        message = f"there is no {request.method} {request.path} here; agents POST to {paths}"
        body = CHAT.error(WireError(error.status, message, "not_found"))
        return web.json_response(body, status=error.status)


async def _waited(
    request: web.Request, pending: PendingTurn, is_stream: bool
) -> web.StreamResponse:
    """Wait until a request is done, and keep its connection alive; return the response,
    which has begun if that took long, or if it is a stream.
    """
    content_type = "application/json"
    keep_alive = b" "
    if is_stream:
        content_type = "text/event-stream"
        keep_alive = b": the policy writes\n\n"
    headers = {"Content-Type": content_type, "Cache-Control": "no-cache"}
    response = web.StreamResponse(headers=headers)
    if is_stream and not pending.done.done():
        await response.prepare(request)
    while True:
        done, _ = await asyncio.wait({pending.done}, timeout=KEEP_ALIVE_S)
        if done:
            return response
        await _send(request, response, keep_alive)


async def _send(
    request: web.Request, response: web.StreamResponse, data: bytes, last: bool = False
) -> None:
    """Write this part of an answer. ConnectionResetError if the client has gone or does
    not read: the answer then counts as not delivered, and is not trained on.
    """
    if not response.prepared:
        await response.prepare(request)
    try:
        async with asyncio.timeout(BODY_LIMIT_S):
            if last:
                await response.write_eof(data)
            else:
                await response.write(data)
    except TimeoutError:
        raise ConnectionResetError("the agent does not read its answer") from None


def _written(protocol: WireProtocol, body: JsonObject, turn: ServedTurn, is_stream: bool) -> bytes:
    """Return the body of an answer, in one piece or as a stream of events."""
    if not is_stream:
        return json.dumps(protocol.reply(body, turn), ensure_ascii=False).encode(errors="replace")
    return b"".join(_event(name, data) for name, data in protocol.events(body, turn))


def _event(name: str, data: Any) -> bytes:
    """Return a server-sent event. data: JSON, or a text that is sent as it is."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {text}\n\n".encode(errors="replace")


def _reward_of(data: bytes) -> float:
    """Return the reward in a body of JSON; true and false are 1 and -1. WireError if it
    is not a finite number.
    """
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise WireError(400, f"reward: the body is not JSON: {error}") from None
    reward = body.get("reward") if isinstance(body, dict) else None
    if isinstance(reward, bool):
        return 1.0 if reward else -1.0
    if not isinstance(reward, int | float) or not abs(reward) <= sys.float_info.max:
        raise WireError(
            400, f"reward: should be a finite number, or true or false, got {reward!r:.80}"
        )
    return float(reward)


def _agent_request(protocol: WireProtocol, body: JsonObject, session: AgentSession) -> AgentRequest:
    """Return the request in a body. WireError if it is refused, or for another
    model.
    """
    model, request = protocol.request(body, session.message_cache)
    if model != MODEL:
        raise _unknown_model(model)
    if not session.asks_for_forms:
        refuse_forms(request)
    return in_words(request)


def _unknown_model(model: str) -> WireError:
    return WireError(
        404, f"the model {model!r} does not exist; the only one is {MODEL!r}", "model_not_found"
    )


def _check_reward(size: int) -> None:
    """Raise WireError if a body of so many bytes is too long for a reward."""
    if size > LARGEST_REWARD:
        raise WireError(
            413, f"reward: the body is longer than {LARGEST_REWARD:,} bytes", "too_large"
        )


async def _read(request: web.Request, check_size: Callable[[int], None]) -> bytes:
    """Return a request's body. check_size: raises WireError if so many bytes are too
    many. WireError also if it is slow to arrive.
    """
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_LIMIT_S):
            async for part in request.content.iter_any():
                parts.append(part)
                size += len(part)
                check_size(size)
    except TimeoutError:
        raise WireError(
            408, f"the body did not arrive within {BODY_LIMIT_S:g} s", "timeout"
        ) from None
    return b"".join(parts)
