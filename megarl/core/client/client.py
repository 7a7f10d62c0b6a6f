"""The client of SGLang servers: generation, scoring, weight updates, memory.

    address = ServerAddress(id=0, url="http://127.0.0.1:30000")
    client = ServerClient(address, api_key, admin_key, timeout_s=3600)
    try:
        generation = await client.generate(
            prompt, 256, temperature=1.0, stop_token_ids=[2], cache_salt="17"
        )
    except ServerLost as lost:      # continue elsewhere from prompt + lost.tokens
        ...

The server streams disjoint chunks of at most STREAM_INTERVAL tokens (launch.py), so a
request on a lost server loses no more than that.

Behaviour log-probs are those of the distribution that was sampled from. SGLang takes
them after dividing by the temperature; with top_p < 1 we ask for its sampling support,
whose log-probs are renormalised (over at most the 4096 likeliest tokens). Greedy
requests (temperature 0) record the log-prob at temperature 1.

The learner is synchronous, and calls all servers at once through a `Fleet` (fleet.py).
Every call has a time limit, and its error names the step and the server. No request is
sent twice: aiohttp repeats only GETs, which change nothing, and a Fleet only harmless
calls (relay.py).
"""

import hashlib
import math
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from copy import copy
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Self

import aiohttp
import msgspec
import numpy as np

from megarl.core.base.device import DeviceIdentity
from megarl.core.base.errors import MegarlError
from megarl.core.base.messages import ServerAddress
from megarl.core.base.types import JsonObject, float32, int32
from megarl.core.client import relay
from megarl.core.client.membership import ServerLoad
from megarl.core.client.relay import (
    RelayedAnswer,
    RelayedCall,
    RelayLost,
    ServerAnswer,
    ServerQuestion,
)

BEGIN = "staged_begin"
JOIN = "staged_join"
RECEIVE = "staged_receive"
CHECKSUMS = "staged_checksums"
SWAP = "staged_swap"
"""Steps in which a server gets weights (staging.py)."""
RUNNING = "running"
"""The scheduler's reply if a step has not ended yet; the call is then repeated."""
LET_DOWN = {JOIN: "Failed to form a process group", RECEIVE: "Failed to receive weights"}
"""A server's errors if the group failed, not the server itself."""
SYN_RETRIES = 3
"""How often Linux asks again for a connection; it gives up after 15 to 20 s. A limit of
asyncio's would end good connections when thousands of requests begin at once, because
its clock runs while this process is busy.
"""
RECEIVE_LIMIT_S = 86_400.0
"""Longer than any publication: the learner has a limit for each bucket, and ends the
call itself.
"""
HEALTH_LIMIT_S = 5.0
CONTROL_LIMIT_S = 30.0
"""Limit of calls whose duration does not depend on the model, unless the client's own
limit is shorter.
"""
REQUEST_LIMIT_S = 3600.0
"""How long a server may send nothing for a request, which waits for memory, or for a
learner on the same GPU. A request as a whole has no limit: 131,072 tokens at 20
tokens/s take two hours. Health checks notice a lost server sooner.
"""
UNACKNOWLEDGED_S = 30.0
"""How long to wait for the other machine to acknowledge bytes that were sent."""
REFUSALS = frozenset({400, 401, 403, 404, 413, 422})
TOP_K_WITH_TOP_P = 4096
"""SGLang reports the sampling support only for a bounded number of candidates; top_p
seldom leaves that many.
"""
LARGEST_SUPPORT = 2 * TOP_K_WITH_TOP_P
"""SGLang ends a request whose support is larger. On a GPU it keeps all tokens that tie
with the last of the top k: of logits in bf16 hundreds may.
"""


class VersionSpan(NamedTuple):
    """Completion tokens [start, end) were sampled with weights of `version`."""

    version: int
    start: int
    end: int


class Generation(NamedTuple):
    """A finished request. tokens: [n] int32, with the stop token. logprobs: [n]
    float32. spans: cover 0 … n in order. routing: the chosen experts
    (Architecture.routed_experts) if they were asked for. cached: tokens of the input
    that the server had in its cache.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    spans: tuple[VersionSpan, ...]
    finish: Literal["stop", "length"]
    routing: str = ""
    cached: int = 0


class Prefill(NamedTuple):
    """Log-probs [n] float32 of given tokens and, if asked for, of the token `against`
    at each position; NaN where the server had no finite number. version: of the
    weights. routing: as in Generation.
    """

    logprobs: np.ndarray
    against: np.ndarray
    version: int
    routing: str = ""


class HeldChecksums(NamedTuple):
    """A server's weights. combined: one checksum over all its ranks. by_rank: the
    checksum of each rank's parameters, by name.
    """

    combined: str
    by_rank: tuple[dict[str, str], ...]


class ServerLost(MegarlError):
    """The server went away, timed out or aborted the request. tokens, logprobs: what
    had been received before. server_is_alive: the server ended this request for a
    reason of its own (SGLang gives such a status), and serves the others.
    """

    def __init__(
        self, reason: str, tokens: np.ndarray, logprobs: np.ndarray, server_is_alive: bool = False
    ) -> None:
        super().__init__(reason)
        self.tokens = tokens
        self.logprobs = logprobs
        self.server_is_alive = server_is_alive


class ServerRefused(MegarlError):
    """The request itself is wrong; every server would refuse it."""


class ServerSaid(MegarlError):
    """The server answered a call with an error, so it is alive."""


class _ReportedSpan(msgspec.Struct):
    version: str
    start: int
    end: int


class _Finish(msgspec.Struct):
    type: Literal["stop", "length", "abort"]
    message: str | None = None
    status_code: int | None = None


class _Error(msgspec.Struct):
    message: str = ""
    code: int = 500


class _Meta(msgspec.Struct):
    finish_reason: _Finish | None = None
    output_token_logprobs: list[tuple[float, int, None]] = []
    output_token_sampling_logprobs: list[float] | None = None
    weight_versions: list[_ReportedSpan] = []
    routed_experts: str = ""
    cached_tokens: int = 0
    num_retractions: int = 0


class _Chunk(msgspec.Struct):
    """The fields that we read from one event; the decoder skips the rest."""

    output_ids: list[int] = []
    meta_info: _Meta = msgspec.field(default_factory=_Meta)
    error: _Error | None = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode
_PREFIX = b"data: "
_END = b"\n\n"
_DONE = b"[DONE]"


async def events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the bodies of server-sent events from a byte stream cut anywhere, up to
    `[DONE]` or the end of the stream.
    """
    parts = [b""]
    async for piece in pieces:
        ends_across_pieces = piece.startswith(b"\n") and parts[-1].endswith(b"\n")
        has_end = _END in piece or ends_across_pieces
        parts.append(piece)
        # A long event, of the chosen experts, comes in many pieces: join them once.
        if not has_end:
            continue
        *complete, partial_event = b"".join(parts).split(_END)
        parts = [partial_event]
        for event in complete:
            body = event.removeprefix(_PREFIX)
            if body == _DONE:
                return
            yield body


class _TokenRequest:
    """The part of a reply with tokens that was received so far, and the errors that may
    end the request.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._tokens = [int32(())]
        self._logprobs = [float32(())]

    def add(self, chunk: _Chunk) -> None:
        """Add the tokens of one event."""
        logprobs = chunk.meta_info.output_token_sampling_logprobs
        if logprobs is None:
            logprobs = [entry[0] for entry in chunk.meta_info.output_token_logprobs]
        self._tokens.append(int32(chunk.output_ids))
        self._logprobs.append(float32(logprobs))

    def received(self) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and log-probs, equally many: an aborted request may report a
        token without its log-prob.
        """
        tokens = np.concatenate(self._tokens)
        logprobs = np.concatenate(self._logprobs)
        n = min(len(tokens), len(logprobs))
        return tokens[:n], logprobs[:n]

    def loss(self, reason: str) -> ServerLost:
        """Return the error of a lost server, with what was received."""
        return ServerLost(f"{self._url} {reason}", *self.received())

    def failed(self, status: int, text: str) -> MegarlError:
        """Return the error of a reply with this status."""
        if status in REFUSALS:
            return ServerRefused(f"{self._url} refused a request ({status}): {text[:500]}")
        return self.loss(f"answered with status {status}: {text[:500]}")

    def aborted(self, finish: _Finish) -> MegarlError:
        """Return the error of a request that the server aborted."""
        if finish.status_code in REFUSALS:
            return ServerRefused(
                f"{self._url} refused a request ({finish.status_code}): {finish.message}"
            )
        # A request aborted while its server was paused still gets one token, from
        # weights that may be half replaced.
        tokens, logprobs = self.received()
        reason = f"{self._url} aborted a request: {finish.message}"
        server_is_alive = finish.status_code is not None
        return ServerLost(reason, tokens[:-1], logprobs[:-1], server_is_alive)


class ServerClient:
    """Asynchronous client of one server, for one event loop: `async with`, or `close()`
    at the end.

    `generate` and `score` raise ServerLost or ServerRefused. The other calls raise
    ServerSaid if the server answered with an error, else MegarlError. timeout_s: how
    long a request may wait for its next tokens, and limit of a call that moves weights.
    heard: when tokens last arrived (time.monotonic()). retractions: how often the
    server has retracted one of our requests.
    """

    def __init__(
        self,
        address: ServerAddress,
        api_key: str,
        admin_key: str,
        timeout_s: float = REQUEST_LIMIT_S,
    ) -> None:
        self.address = address
        self._api_key = api_key
        self._admin_key = admin_key
        self._timeout_s = timeout_s
        self.heard = -math.inf
        self.retractions = 0
        self._session: aiohttp.ClientSession | None = None
        self._replies: set[aiohttp.ClientResponse] = set()  # of running requests for tokens
        self._ask: Callable[[ServerQuestion], Awaitable[ServerAnswer]] = self.exchange

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Drop all connections. The server aborts the requests on them; they raise
        ServerLost. The next call reconnects.
        """
        session = self._session
        self._session = None
        for reply in self._replies:
            reply.close()  # closing only the session does not wake the reader of a reply
        if session is not None:
            await session.close()

    async def generate(
        self,
        input_ids: Sequence[int] | np.ndarray,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        stop_token_ids: Sequence[int] = (),
        cache_salt: str | None = None,
        group: str | None = None,
        ignore_eos: bool = False,
        routing_from: int | None = None,
        started: Callable[[], None] = lambda: None,
    ) -> Generation:
        """Sample until a stop token, the model's own end token, or `max_new_tokens`.
        Cancelling aborts the request on the server. cache_salt: requests with different
        salts share no cached prefixes. group: requests of a group go to the same copy
        of the attention, if the server has several. ignore_eos: go on to
        `max_new_tokens` (benchmarks). routing_from: also return the experts chosen from
        this position of `input_ids` on. started: called whenever tokens arrive; the
        server's cache then has the input.
        """
        sampling = {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": _top_k(top_p),
            "stop_token_ids": list(stop_token_ids),
            "ignore_eos": ignore_eos,
        }
        body = {
            "input_ids": np.asarray(input_ids).tolist(),
            "sampling_params": sampling,
            "return_logprob": True,
            "return_sampling_mask": top_p < 1.0,
            "return_routed_experts": routing_from is not None,
            "routed_experts_start_len": routing_from or 0,
            "cache_salt": cache_salt,
            "routing_key": group,
            "stream": True,
        }
        return await self._generate(body, started)

    async def _generate(self, body: dict[str, object], started: Callable[[], None]) -> Generation:
        """Send a request for tokens and read its reply to the end. started: called
        whenever tokens arrive. ServerLost, with the tokens received, if the reply
        breaks off; ServerRefused if the server refuses the request.
        """
        request = _TokenRequest(self.address.url)
        retractions = 0
        async with self._replying(request, body) as reply:
            async for event in events(reply.content.iter_any()):
                chunk = _decode_chunk(event)
                if chunk.error is not None:
                    raise request.failed(chunk.error.code, chunk.error.message)
                request.add(chunk)
                started()
                self.heard = time.monotonic()
                meta = chunk.meta_info
                self.retractions += meta.num_retractions - retractions
                retractions = meta.num_retractions
                if meta.finish_reason is not None:
                    return _generation(request, meta, meta.finish_reason)
        raise request.loss("ended a stream before its last token")

    async def score(
        self,
        sequences: Sequence[np.ndarray],
        firsts: Sequence[int],
        cache_salt: str,
        against: int | None = None,
        routing: bool = False,
    ) -> list[Prefill]:
        """Return log-probs, at temperature 1, of the tokens of each sequence [n] from
        its position `first` (at least 1) on. The part before `first` may come from
        cached prefixes of the same salt; SGLang always computes the scored part.
        against: also score this token at each position. routing: also return the
        experts chosen for all tokens.
        """
        body = {
            "input_ids": [s.tolist() for s in sequences],
            # Temperature 1: the token is not used, and a greedy request would cost
            # every other one a sort (own_batches).
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": [first - 1 for first in firsts],
            "token_ids_logprob": None if against is None else [[against]] * len(sequences),
            "return_routed_experts": routing,
            "cache_salt": [cache_salt] * len(sequences),
        }
        request = _TokenRequest(self.address.url)
        async with self._replying(request, body) as reply:
            metas = [item["meta_info"] for item in msgspec.json.decode(await reply.read())]
        for meta in metas:
            if meta["finish_reason"]["type"] == "abort":
                raise request.aborted(msgspec.convert(meta["finish_reason"], _Finish))
        return [_prefill(meta) for meta in metas]

    @asynccontextmanager
    async def _replying(
        self, request: _TokenRequest, body: dict[str, object]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield a good reply to a request for tokens. A failure while reading it raises
        ServerLost with what was received.
        """
        limit = aiohttp.ClientTimeout(sock_read=self._timeout_s)
        headers = {"Authorization": f"Bearer {self._api_key}", "Content-Type": "application/json"}
        url = f"{self.address.url}/generate"
        data = msgspec.json.encode(body)
        try:
            async with self._connections().post(
                url, data=data, headers=headers, timeout=limit, allow_redirects=False
            ) as reply:
                if reply.status != 200:
                    raise request.failed(reply.status, await reply.text())
                self._replies.add(reply)
                try:
                    yield reply
                finally:
                    self._replies.discard(reply)
        except TimeoutError:
            raise request.loss(f"sent nothing for a request for {self._timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
            raise request.loss(_reason_of_loss(error)) from None

    async def health(self) -> bool:
        """Return whether the server replies within HEALTH_LIMIT_S that it accepts
        requests. This needs no key.
        """
        try:
            await self._call("ask for its health", "/health", None, HEALTH_LIMIT_S, "")
        except MegarlError:
            return False
        return True

    async def warm_up(self, top_p: float) -> None:
        """Generate one token, sampled as in evaluations: on a GPU the first use of a
        nucleus compiles kernels, for a minute or two in which a server answers nothing
        and would count as lost.
        """
        body = {
            "input_ids": [0],
            "sampling_params": {"max_new_tokens": 1, "top_p": top_p, "top_k": _top_k(top_p)},
            "return_logprob": True,
            "return_sampling_mask": top_p < 1.0,
        }
        await self._call("generate a token", "/generate", body, self._timeout_s, self._api_key)

    async def pause(self, mode: str) -> None:
        """Pause all work on requests. mode: in_place or retract."""
        await self._call("pause", "/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Continue the requests of a paused server."""
        await self._call("continue", "/continue_generation", {"torch_empty_cache": False})

    async def abort_all(self) -> None:
        """Abort every request on the server; each raises ServerLost at its caller."""
        await self._call("abort", "/abort_request", {"abort_all": True})

    async def served_version(self) -> int:
        """Return the version that the server labels tokens with; -1 if nothing was
        published to this process.
        """
        reply = await self._call("ask for its version", "/model_info", key=self._api_key)
        return int(reply["weight_version"])

    async def current_load(self) -> ServerLoad:
        """Return how busy the server is, as its scheduler last reported; of several,
        one for each copy of the attention, what the fullest one uses.
        """
        reply = await self._call("ask for its load", "/v1/loads", key=self._api_key)
        try:
            loads = reply["loads"]
            usage = max(float(load["token_usage"]) for load in loads)
            waiting = sum(int(load["num_waiting_reqs"]) for load in loads)
        except (KeyError, TypeError, ValueError):
            raise self.error("ask for its load", f"an answer without it: {reply}") from None
        return ServerLoad(usage, waiting)

    async def begin_update(self) -> None:
        """Open an update of weights; first close one that a lost learner left open."""
        try:
            await self._call("begin", "/begin_weight_update", {})
        except ServerSaid as error:
            if "already open" not in str(error):
                raise
            await self.end_update()
            await self._call("begin", "/begin_weight_update", {})

    async def end_update(self) -> None:
        """Close the update of weights."""
        await self._call("end", "/end_weight_update", {}, self._timeout_s)

    async def stage(self, version: int, base: int | None = None) -> None:
        """Begin staging weights (staging.py) and drop earlier staged ones. base: the
        version to which deltas apply, if any.
        """
        arguments = {"version": str(version), "base": "" if base is None else str(base)}
        await self._staging("begin", BEGIN, arguments, self._timeout_s)

    async def join_group(
        self, name: str, master: str, port: int, first: int, world: int, backend: str
    ) -> None:
        """Make the server's tensor-parallel ranks ranks `first` … of a process group
        with the learner's rank 0.
        """
        arguments = {
            "name": name,
            "master": master,
            "port": port,
            "first": first,
            "world": world,
            "backend": backend,
        }
        await self._staging("form a process group", JOIN, arguments, self._timeout_s, once=True)

    async def leave_group(self, name: str) -> None:
        """Make the server's ranks leave a process group, if they are in it."""
        await self._call(
            "leave a process group", "/destroy_weights_update_group", {"group_name": name}
        )

    async def receive(self, group: str) -> None:
        """Stage all that is broadcast in the group. The server has a limit for each
        wait in it, the caller for the whole.
        """
        await self._staging("receive", RECEIVE, {"group": group}, RECEIVE_LIMIT_S, once=True)

    async def staged_checksums(self) -> HeldChecksums:
        """Return what `checksums` will return after the swap."""
        reply = await self._staging("checksum", CHECKSUMS, {}, self._timeout_s)
        return _of_all_ranks(_decoded(reply))

    async def swap(self, version: int) -> None:
        """Replace the paused server's weights by the staged ones, and label tokens with
        `version` from now on.
        """
        await self._staging("swap", SWAP, {}, self._timeout_s, version=str(version))

    async def _staging(
        self,
        task: str,
        step: str,
        arguments: object,
        limit_s: float,
        *,
        once: bool = False,
        version: str | None = None,
    ) -> str:
        """Call a step of staging and return the reply of the server's ranks, in JSON.
        It goes through SGLang's call for weights: `step` is in the place of the load
        format, the arguments in that of a name (staging.py). task: the name of the step
        in errors. once: as in ServerQuestion. version: the new label of tokens, if any.
        """
        body = {
            "names": [msgspec.json.encode(arguments).decode()],
            "dtypes": [],
            "shapes": [],
            "load_format": step,
            "weight_version": version,
            "flush_cache": False,
        }
        path = "/update_weights_from_distributed"
        reply = await self._call(task, path, body, limit_s, once=once)
        return str(reply["message"])

    async def take(self, handles: list[str], complete: int | None) -> None:
        """Copy a bucket from the learner's memory, with one handle per server rank.
        complete: for the last one, the version.
        """
        body = {
            "serialized_named_tensors": handles,
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "weight_version": None if complete is None else str(complete),
        }
        await self._call("hand over", "/update_weights_from_tensor", body, self._timeout_s)

    async def load(self, path: str, version: int) -> None:
        """Load all weights from a Hugging Face directory."""
        body = {"model_path": path, "flush_cache": False, "weight_version": str(version)}
        await self._call("load from disk", "/update_weights_from_disk", body, self._timeout_s)

    async def checksums(self) -> HeldChecksums:
        """Return the checksums of the weights that the server computes with."""
        body = {"action": "checksum"}
        reply = await self._call("checksum", "/weights_checker", body, self._timeout_s)
        return _of_all_ranks(reply["ranks"])

    async def device_identity(self) -> DeviceIdentity:
        """Return the server's machine and GPUs."""
        reply = await self._call("ask for its devices", "/device_identity")
        return msgspec.convert(reply, DeviceIdentity)

    async def release_memory(self) -> None:
        """Release the KV memory of a server that was paused with its requests
        retracted. Repeating this is harmless.
        """
        await self._call("release memory", "/release_memory_occupation", {"tags": ["kv_cache"]})

    async def resume_memory(self) -> None:
        """Allocate that memory again. Repeating this, or calling it for a server that
        released nothing, is harmless.
        """
        await self._call("resume memory", "/resume_memory_occupation", {"tags": ["kv_cache"]})

    def error(self, step: str, reason: str, kind: type[MegarlError] = MegarlError) -> MegarlError:
        """Return an error that names this server and the step."""
        return kind(f"server {self.address.id} ({self.address.url}): {step}: {reason}")

    async def _call(
        self,
        step: str,
        path: str,
        body: object = None,
        limit_s: float | None = None,
        key: str | None = None,
        once: bool = False,
    ) -> Any:
        """Return the reply's JSON, None if it has none. Without a body this is a GET.
        step: its name in errors. limit_s: None for that of calls whose duration does
        not depend on the model. key: None for the admin key. once: as in
        ServerQuestion. RelayLost, ServerSaid or MegarlError if it fails.
        """
        if limit_s is None:
            limit_s = min(self._timeout_s, CONTROL_LIMIT_S)
        if key is None:
            key = self._admin_key
        data = b"" if body is None else msgspec.json.encode(body)
        status, text = await self._ask(ServerQuestion(path, data, key, limit_s, once))
        if status == relay.RELAY_LOST:
            raise self.error(step, text, RelayLost)
        if status == relay.SILENT and limit_s == self._timeout_s:
            raise self.error(step, f"{text} (weights.timeout_s)")
        if status in (relay.SILENT, relay.UNREACHABLE):
            raise self.error(step, text)
        reply = _decoded(text)
        if status != relay.OK:
            fields = reply if isinstance(reply, dict) else {}
            message = str(fields.get("message") or fields.get("error") or text)
            raise self.error(step, f"{status}: {message[:500]}", ServerSaid)
        return reply

    def asking(self, ask: Callable[[ServerQuestion], Awaitable[ServerAnswer]]) -> "ServerClient":
        """Return the same client, whose calls send their questions by `ask`."""
        client = copy(self)
        client._ask = ask
        return client

    async def exchange(self, question: ServerQuestion) -> ServerAnswer:
        """Ask the server directly. Failures are answers, too."""
        return await relay.exchange(self._connections(), self.address.url, question)

    async def relay(
        self, call: RelayedCall, key: str, pass_on: Callable[[RelayedAnswer], None]
    ) -> None:
        """Have the server pass a call on, and call `pass_on` with each answer. Return
        early if it refuses or is lost.
        """
        limit = aiohttp.ClientTimeout(total=call.limit_s + relay.GRACE_S)
        headers = {"Authorization": f"Bearer {key}"}
        url = f"{self.address.url}/relay"
        data = msgspec.json.encode(call)
        with suppress(TimeoutError, aiohttp.ClientError, OSError):
            async with self._connections().post(
                url, data=data, headers=headers, timeout=limit
            ) as reply:
                if reply.status != relay.OK:
                    await reply.read()
                    return
                partial_line = b""
                async for piece in reply.content.iter_any():
                    *lines, partial_line = (partial_line + piece).split(b"\n")
                    for line in lines:
                        pass_on(msgspec.json.decode(line, type=RelayedAnswer))

    def _connections(self) -> aiohttp.ClientSession:
        """Return the session, made at the first request after the start or `close`: it
        belongs to the event loop that then runs.
        """
        if self._session is None:
            connector = aiohttp.TCPConnector(
                limit=0, keepalive_timeout=relay.KEEP_ALIVE_S, socket_factory=_socket
            )
            self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        return self._session


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Make a socket whose connection ends soon after the other machine is gone; by
    default Linux takes a quarter of an hour.
    """
    family, kind, protocol, *_ = address
    client_socket = socket.socket(family, kind, protocol)
    client_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, SYN_RETRIES)
    client_socket.setsockopt(
        socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * UNACKNOWLEDGED_S)
    )
    return client_socket


def _top_k(top_p: float) -> int:
    """Return SGLang's top_k for requests with this top_p; -1 for no limit."""
    return TOP_K_WITH_TOP_P if top_p < 1.0 else -1


def _generation(request: _TokenRequest, meta: _Meta, finish: _Finish) -> Generation:
    """Return the finished request, or raise the error of an aborted one."""
    if finish.type == "abort":
        raise request.aborted(finish)
    spans = tuple(
        VersionSpan(int(span.version), span.start, span.end) for span in meta.weight_versions
    )
    tokens, logprobs = request.received()
    return Generation(tokens, logprobs, spans, finish.type, meta.routed_experts, meta.cached_tokens)


def _reason_of_loss(error: Exception) -> str:
    """Return what happened to a request whose reply broke off, or cannot be decoded. A
    null among log-probs was a NaN, which JSON does not have.
    """
    text = str(error)
    is_invalid = isinstance(error, msgspec.ValidationError)
    if is_invalid and "got `null`" in text and "logprobs" in text:
        cause = "its weights or activations are NaN or infinite"
        advice = "compare the model with `python -m checkpoints_tools verify DIR DIR`"
        return (
            f"answered with log-probs that are NaN: {cause}; {advice}, or try another model.dtype"
        )
    return f"was lost: {type(error).__name__}: {error}"


@lru_cache(maxsize=2)
def _decoded(text: str) -> Any:
    """Parse JSON; None if it is invalid. Cached, as many servers may give the same
    answer, so do not change the result.
    """
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None


def _of_all_ranks(ranks: list[JsonObject]) -> HeldChecksums:
    """Read the ranks' answers, in the order of their numbers."""
    texts = "".join(rank["per_gpu_checksum"] for rank in ranks)
    combined = hashlib.sha256(texts.encode()).hexdigest()
    return HeldChecksums(combined, tuple(rank["checksums"] for rank in ranks))


def _prefill(meta: JsonObject) -> Prefill:
    """Read scores from a reply's meta_info. The first entry has no log-prob, because
    nothing precedes it.
    """
    scores = [entry[0] for entry in meta["input_token_logprobs"][1:]]
    logprobs = np.array(scores, np.float32)  # None becomes nan
    against = np.full_like(logprobs, np.nan)
    scores_against = [entry[0][0] for entry in meta.get("input_token_ids_logprobs", ())[1:]]
    if scores_against:
        against = np.array(scores_against, np.float32)
    return Prefill(logprobs, against, int(meta["weight_version"]), meta.get("routed_experts", ""))
