"""Access control in front of an SGLang server. All HTTP calls pass through it; SGLang
itself gets no keys.

    GET  /health                                      anybody
    POST /generate, GET /model_info, GET /v1/loads    the user key
    GET  /metrics                                     the metrics key, if
                                                      monitor.prometheus is on
    calls that pause, continue or replace weights     the admin key
    POST /update_weights_from_tensor                  the admin key, from this machine,
                                                      with weights.transport: cuda_ipc
    POST /relay                                       the key of the call to pass on, to
                                                      servers of the run (relay.py)
    POST /freeze_gc                                   this machine, once: SGLang calls
                                                      itself at the end of its start
    everything else                                   nobody

Token ids of /generate are checked: an id outside the vocabulary would crash SGLang's
scheduler, and a retry the next server's. SGLang's own check is not enough: anybody may
make it generate (/health_generate) or open a websocket, it reveals its keys among its
arguments, and other calls unpickle input or write files. Handles, which are unpickled,
are useless on other machines.

`OwnReplies` replies in place of SGLang:

    GET  /device_identity             its machine and GPUs
    GET  /health                      success, while it is paused
    POST /release_memory_occupation,
         /resume_memory_occupation    nothing to do, if already done

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
from megarl.core.client.relay import KEEP_ALIVE_S, RelayedCall, relayed

log = logging.getLogger(__name__)

OPEN = frozenset({("GET", "/health")})
GENERATE = ("POST", "/generate")
RELAY = ("POST", "/relay")
USER = frozenset({GENERATE, ("GET", "/model_info"), ("GET", "/v1/loads")})
METRICS = frozenset({("GET", "/metrics")})
ADMIN = frozenset(
    {
        ("GET", "/device_identity"),
        ("POST", "/pause_generation"),
        ("POST", "/continue_generation"),
        ("POST", "/abort_request"),
        ("POST", "/flush_cache"),
        ("POST", "/begin_weight_update"),
        ("POST", "/end_weight_update"),
        ("POST", "/destroy_weights_update_group"),
        ("POST", "/update_weights_from_distributed"),
        ("POST", "/update_weights_from_disk"),
        ("POST", "/weights_checker"),
        ("POST", "/release_memory_occupation"),
        ("POST", "/resume_memory_occupation"),
    }
)
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
    key = ""
    if call in USER:
        key = endpoints.api_key
    elif call in ADMIN or (handles and call in LOCAL):
        key = endpoints.admin_key
    elif call in METRICS:
        key = endpoints.metrics_key
    if not key:
        return 404
    return 200 if has_key(authorization, key) else 401


def has_key(authorization: bytes, key: str) -> bool:
    """Return whether a call is authorized by this key. Takes the same time for each."""
    return secrets.compare_digest(authorization, f"Bearer {key}".encode())


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
        request = msgspec.json.decode(body, type=Generate)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return str(error)
    fields = [("input_ids", request.input_ids), ("token_ids_logprob", request.token_ids_logprob)]
    sampling = request.sampling_params or []
    if isinstance(sampling, SamplingFields):
        sampling = [sampling]
    for parameters in sampling:
        fields.append(("stop_token_ids", parameters.stop_token_ids))
        fields.append(("logit_bias", [_token(text) for text in parameters.logit_bias or ()]))
    for name, ids in fields:
        if fault := _fault_of_ids(name, ids or [], vocabulary):
            return fault
    return ""


def _token(text: str) -> int:
    """Return the token id that a key of logit_bias names; -1 if none."""
    return int(text[:20]) if text.isdecimal() else -1


def _fault_of_ids(name: str, ids: list[Any], vocabulary: int) -> str:
    """Return the fault in a field's token ids, one list or several; empty if none."""
    rows = [row for row in ids if not isinstance(row, int)]
    if not rows:
        rows = [ids]
    elif len(rows) != len(ids):
        return f"{name} has both tokens and lists of tokens"
    for row in rows:
        if row and not 0 <= min(row) <= max(row) < vocabulary:
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
        """Pass a call on, or refuse it."""
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
            reason = "Unauthorized" if code == 401 else "Not Found"
            return await self._refuse(code, reason, scope, receive, send)
        if call == GENERATE:
            try:
                body = await Request(scope, receive).body()
            except ClientDisconnect:
                return None
            receive = _repeating(body, receive)
            if fault := nonsense(body, self._vocabulary):
                return await self._refuse(400, fault, scope, receive, send)
        await self._app(scope, receive, send)

    async def _relay(
        self, authorization: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Pass a call on to servers of the run, if this gate would allow it with this
        key.
        """
        keys = (self._endpoints.api_key, self._endpoints.admin_key)
        if not any(has_key(authorization, key) for key in keys):
            return await self._refuse(401, "Unauthorized", scope, receive, send)
        try:
            call = msgspec.json.decode(await Request(scope, receive).body(), type=RelayedCall)
        except ClientDisconnect:
            return None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return await self._refuse(400, str(error), scope, receive, send)
        method = "POST" if call.body else "GET"
        code = status(method, call.path, authorization, self._endpoints, handles=False)
        is_generation = (method, call.path) == GENERATE
        if is_generation or not set(call.urls) <= set(self._endpoints.servers):
            code = 404
        if code != 200:
            reason = f"{call.path!r:.100} is not relayed"
            return await self._refuse(code, reason, scope, receive, send)
        if self._session is None:  # it belongs to the running event loop
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector)
        key = authorization.decode().removeprefix("Bearer ")
        await StreamingResponse(relayed(self._session, call, key))(scope, receive, send)

    async def _refuse(
        self, code: int, reason: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._count(f"{scope['method']} {scope['path']!r:.100}: {code}: {reason}", scope)
        await JSONResponse({"error": reason}, code)(scope, receive, send)

    def _count(self, request: str, scope: Scope) -> None:
        self.refused += 1
        # Only powers of two, so that attempts cannot fill the log.
        if self.refused.bit_count() == 1:
            client = (scope.get("client") or "?")[0]
            log.warning(
                "requests refused so far: %d, this one from %s: %s", self.refused, client, request
            )


def _repeating(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that delivers an already read body again, then the messages
    after it.
    """
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return first.pop() if first else await receive()

    return receive_again


PAUSED = {"/pause_generation": True, "/continue_generation": False}
RELEASED = {"/release_memory_occupation": True, "/resume_memory_occupation": False}


class OwnReplies:
    """ASGI middleware that replies to some calls in place of SGLang. place: the reply
    to /device_identity.
    """

    def __init__(self, app: ASGIApp, place: DeviceIdentity) -> None:
        self._app = app
        self._place = Response(msgspec.json.encode(place), media_type="application/json")
        self._paused = False
        self._released = False
        self._one_at_a_time = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reply to a call, or pass it on."""
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
            releases = RELEASED[path]
            if releases == self._released:
                return await JSONResponse(None)(scope, receive, send)

            async def watch(message: Message) -> None:
                if message["type"] == "http.response.start" and message["status"] == 200:
                    self._released = releases
                await send(message)

            await self._app(scope, receive, watch)
