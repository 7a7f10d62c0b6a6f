"""Access control in front of an SGLang server. All HTTP calls pass through it; SGLang
itself gets no keys.

    GET  /health                                      anybody
    POST /generate, GET /model_info, GET /v1/loads    the user key
    GET  /metrics                                     the metrics key, if monitor.prometheus is on
    calls that pause, continue or replace weights     the admin key
    POST /update_weights_from_tensor                  the admin key, from this machine, with weights.transport: cuda_ipc
    POST /relay                                       the key of the call to pass on, to servers of the run (relay.py)
    POST /freeze_gc                                   this machine, once: SGLang calls itself at the end of its start
    everything else                                   nobody

Token ids of /generate are checked: an id outside the vocabulary would crash SGLang's
scheduler, and a retry the next server's. SGLang's own check is not enough: anybody may
make it generate (/health_generate) or open a websocket, it reveals its keys among its
arguments, and other calls unpickle input or write files. Handles, which are unpickled,
are useless on other machines.

`OwnReplies` replies in place of SGLang:

    GET  /device_identity                                       its machine and GPUs
    GET  /health                                                success, while it is paused
    POST /release_memory_occupation, /resume_memory_occupation  nothing to do, if
    already done

SGLang's /health generates a token, which a paused server cannot, so a server that waits
for its learner would seem lost. SGLang also dies if memory is released or resumed
twice, but a restarted learner does not know what its predecessor did.
"""

import asyncio
import logging
import secrets
from typing import Any

import aiohttp
import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megarl.core.base.device import DeviceIdentity
from megarl.core.base.rundir import Endpoints
from megarl.core.server.relay import KEEP_ALIVE_S, RelayedCall, relayed

log = logging.getLogger(__name__)

OPEN = frozenset({("GET", "/health")})
GENERATE = ("POST", "/generate")
RELAY = ("POST", "/relay")
USER = frozenset({GENERATE, ("GET", "/model_info"), ("GET", "/v1/loads")})
METRICS = frozenset({("GET", "/metrics")})
ADMIN = frozenset(
    ("POST", path)
    for path in (
        "/pause_generation",
        "/continue_generation",
        "/abort_request",
        "/flush_cache",
        "/begin_weight_update",
        "/end_weight_update",
        "/destroy_weights_update_group",
        "/update_weights_from_distributed",
        "/update_weights_from_disk",
        "/weights_checker",
        "/release_memory_occupation",
        "/resume_memory_occupation",
    )
) | {("GET", "/device_identity")}
LOCAL = frozenset({("POST", "/update_weights_from_tensor")})
FREEZE = ("POST", "/freeze_gc")
"""Hides the objects made at the start from the garbage collector. SGLang makes this
call without a key.
"""


def status(
    method: str, path: str, authorization: bytes, endpoints: Endpoints, handles: bool
) -> int:
    """Return 200 if the call is allowed, 401 if it needs another key, 404 if nobody may
    make it. handles: as in Gate.
    """
    call = (method, path)
    if call in OPEN:
        return 200
    local = LOCAL if handles else frozenset()
    keys = (
        (USER, endpoints.api_key),
        (ADMIN | local, endpoints.admin_key),
        (METRICS, endpoints.metrics_key),
    )
    for calls, key in keys:
        if call in calls and key:
            return 200 if secrets.compare_digest(authorization, f"Bearer {key}".encode()) else 401
    return 404


type Ids = list[int | list[int] | None] | None


class SamplingFields(msgspec.Struct):
    """The fields of `sampling_params` that contain tokens."""

    stop_token_ids: Ids = None
    logit_bias: dict[str, float] | None = None


class Generate(msgspec.Struct):
    """The fields of a generation request that contain tokens."""

    input_ids: Ids = None
    token_ids_logprob: Ids = None
    sampling_params: SamplingFields | list[SamplingFields] | None = None


def nonsense(body: bytes, vocabulary: int) -> str:
    """Return the first fault in the token ids of a generation request; empty if there
    is none.
    """
    try:
        asked = msgspec.json.decode(body, type=Generate)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return str(error)
    sampling = asked.sampling_params or []
    named = [("input_ids", asked.input_ids), ("token_ids_logprob", asked.token_ids_logprob)]
    for each in sampling if isinstance(sampling, list) else [sampling]:
        biased = [int(text[:20]) if text.isdecimal() else -1 for text in each.logit_bias or ()]
        named += [("stop_token_ids", each.stop_token_ids), ("logit_bias", [*biased])]
    for name, ids in named:
        lists = [each for each in ids or () if not isinstance(each, int)]
        if lists and len(lists) != len(ids or ()):
            return f"{name} has both tokens and lists of tokens"
        rows: list[Any] = lists or [ids]
        for row in filter(None, rows):
            if not 0 <= min(row) <= max(row) < vocabulary:
                return (
                    f"{name} has ids {min(row)} to {max(row)}, but the vocabulary only 0 to"
                    f" {vocabulary - 1}"
                )
    return ""


class Gate:
    """ASGI middleware that checks keys and token ids. refused: number of refused
    requests. handles: a learner on this machine may send memory handles. vocabulary:
    the model's number of tokens.
    """

    def __init__(self, app: ASGIApp, endpoints: Endpoints, handles: bool, vocabulary: int) -> None:
        self._app = app
        self._endpoints = endpoints
        self._handles = handles
        self._vocabulary = vocabulary
        self.refused = 0
        self._frozen = False
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            self._count("a websocket", scope)
            return await send({"type": "websocket.close", "code": 1008})
        call = (scope["method"], scope["path"])
        authorization = dict(scope["headers"]).get(b"authorization", b"")
        if call == RELAY:
            return await self._relay(authorization, scope, receive, send)
        # A caller whose address equals the server's is on this machine.
        local = scope["client"][0] == scope["server"][0]
        code = status(*call, authorization, self._endpoints, self._handles and local)
        if local and not self._frozen and call == FREEZE:
            self._frozen = True
            code = 200
        if code != 200:
            return await self._refuse(
                code, "Unauthorized" if code == 401 else "Not Found", scope, receive, send
            )
        if call == GENERATE:
            try:
                body = await Request(scope, receive).body()
            except ClientDisconnect:
                return None
            receive = _again(body, receive)
            if why := nonsense(body, self._vocabulary):
                return await self._refuse(400, why, scope, receive, send)
        await self._app(scope, receive, send)

    async def _relay(
        self, authorization: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Pass a call on to servers of the run, if this gate would allow it with this
        key.
        """
        keys = (self._endpoints.api_key, self._endpoints.admin_key)
        if not any(secrets.compare_digest(authorization, f"Bearer {key}".encode()) for key in keys):
            return await self._refuse(401, "Unauthorized", scope, receive, send)
        try:
            call = msgspec.json.decode(await Request(scope, receive).body(), type=RelayedCall)
        except ClientDisconnect:
            return None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return await self._refuse(400, str(error), scope, receive, send)
        inner = "POST" if call.body else "GET", call.path
        code = status(*inner, authorization, self._endpoints, handles=False)
        if inner == GENERATE or not set(call.urls) <= set(self._endpoints.servers):
            code = 404
        if code != 200:
            return await self._refuse(
                code, f"{call.path!r:.100} is not relayed", scope, receive, send
            )
        if self._session is None:  # it belongs to the running event loop
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector)
        key = authorization.decode().removeprefix("Bearer ")
        await StreamingResponse(relayed(self._session, call, key))(scope, receive, send)

    async def _refuse(
        self, code: int, why: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._count(f"{scope['method']} {scope['path']!r:.100}: {code}: {why}", scope)
        await JSONResponse({"error": why}, code)(scope, receive, send)

    def _count(self, what: str, scope: Scope) -> None:
        self.refused += 1
        if (
            self.refused & (self.refused - 1) == 0
        ):  # only powers of two, so that attempts cannot fill the log
            client = (scope.get("client") or "?")[0]
            log.warning(
                "requests refused so far: %d, this one from %s: %s", self.refused, client, what
            )


def _again(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that delivers an already read body again, then the messages
    after it.
    """
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return first.pop() if first else await receive()

    return again


PAUSED = {"/pause_generation": True, "/continue_generation": False}
RELEASED = {"/release_memory_occupation": True, "/resume_memory_occupation": False}


class OwnReplies:
    """ASGI middleware that replies to some calls in place of SGLang. place: the reply
    to /device_identity.
    """

    def __init__(self, app: ASGIApp, place: DeviceIdentity) -> None:
        self._app = app
        self._place = Response(msgspec.json.encode(place), media_type="application/json")
        self._paused = self._released = False
        self._one_at_a_time = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path == "/device_identity":
            return await self._place(scope, receive, send)
        if path == "/health" and self._paused:
            return await JSONResponse(None)(scope, receive, send)
        if path in PAUSED:
            self._paused = PAUSED[path]
        if path not in RELEASED:
            return await self._app(scope, receive, send)
        async with self._one_at_a_time:
            wanted = RELEASED[path]
            if wanted == self._released:
                return await JSONResponse(None)(scope, receive, send)

            async def watch(message: Message) -> None:
                if message["type"] == "http.response.start" and message["status"] == 200:
                    self._released = wanted
                await send(message)

            await self._app(scope, receive, watch)
