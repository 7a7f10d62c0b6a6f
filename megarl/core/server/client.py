"""The client of SGLang servers: generation, scoring, weight updates, memory.

    client = ServerClient(ServerAddress(id=0, url="http://127.0.0.1:30000"), api_key, admin_key, timeout_s=3600)
    try:
        generation = await client.generate(prompt, 256, temperature=1.0, stop_token_ids=[2], cache_salt="17")
    except ServerLost as lost:      # continue elsewhere from prompt + lost.tokens
        ...

The server streams disjoint chunks of at most STREAM_INTERVAL tokens (launch.py): that many a lost server costs a request.
Each chunk is parsed once, into numpy arrays, without a Python loop over tokens.

Behaviour log-probs are those of the distribution that was sampled from. SGLang takes them after dividing by the temperature;
with top_p < 1 we ask for its sampling support, whose log-probs are renormalised (over at most the 4096 likeliest tokens).
Greedy requests (temperature 0) record the log-prob at temperature 1.

The learner is synchronous, and calls all servers at once through a `Fleet`:

    fleet.each(ids, lambda server: server.pause("in_place"))  ──►  results and errors, by server id

Every call has a limit, and its error names the step and the server. A dead server costs the others only that limit. No
request is sent twice: aiohttp repeats only a GET, which changes nothing.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Literal, NamedTuple, Self

import aiohttp
import msgspec
import numpy as np

from megarl.core.base.device import DeviceIdentity
from megarl.core.base.errors import MegarlError
from megarl.core.base.messages import ServerAddress
from megarl.core.base.types import float32, int32

CONNECT_LIMIT_S = 10.0
HEALTH_LIMIT_S = 5.0
CONTROL_LIMIT_S = 30.0
REQUEST_LIMIT_S = 3600.0
"""Limit of a generation request: 32,768 tokens at 10 tokens/s take 55 minutes. Health checks notice a lost server sooner."""
"""Limit of calls whose duration does not depend on the model, unless the client's own limit is shorter."""
KEEP_ALIVE_S = 2.0
"""Idle connections are dropped after this time. The server closes them after 5 s; a request on a closed one would be lost."""
REFUSALS = frozenset({400, 401, 403, 404, 413, 422})
TOP_K_WITH_TOP_P = 4096
"""SGLang reports the sampling support only for a bounded number of candidates; top_p seldom leaves as many."""


class VersionSpan(NamedTuple):
    """Completion tokens [start, end) were sampled with weights of `version`."""

    version: int
    start: int
    end: int


class Generation(NamedTuple):
    """A finished request.

    tokens [n] int32, with the stop token; logprobs [n] float32; spans cover 0 … n in order. routing: the chosen experts
    (RoutedLayers) if they were asked for, else "".
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    spans: tuple[VersionSpan, ...]
    finish: Literal["stop", "length"]
    routing: str = ""


class Prefill(NamedTuple):
    """Scores of given tokens.

    logprobs [n] float32: of the tokens; against [n] float32: of one other token in each place, nan if none was named. Both
    are nan where the server had no finite number. version: of the weights. routing: as in Generation.
    """

    logprobs: np.ndarray
    against: np.ndarray
    version: int
    routing: str = ""


class ServerLost(MegarlError):
    """The server went away, timed out or aborted the request. `tokens`, `logprobs`: what had arrived before."""

    def __init__(self, reason: str, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        super().__init__(reason)
        self.tokens = tokens
        self.logprobs = logprobs


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


class _Meta(msgspec.Struct):
    finish_reason: _Finish | None = None
    output_token_logprobs: list[tuple[float, int, None]] = []
    output_token_sampling_logprobs: list[float] | None = None
    weight_versions: list[_ReportedSpan] = []
    routed_experts: str = ""


class _Error(msgspec.Struct):
    message: str = ""
    code: int = 500


class _Chunk(msgspec.Struct):
    """The fields that we read from one event; the decoder skips the rest."""

    output_ids: list[int] = []
    meta_info: _Meta = msgspec.field(default_factory=_Meta)
    error: _Error | None = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode
_PREFIX, _END, _DONE = b"data: ", b"\n\n", b"[DONE]"


async def events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the bodies of server-sent events from a byte stream cut anywhere, until `[DONE]` or the end of the stream."""
    rest = b""
    async for piece in pieces:
        rest += piece
        *whole, rest = rest.split(_END)
        for event in whole:
            body = event.removeprefix(_PREFIX)
            if body == _DONE:
                return
            yield body


class _Received:
    """The tokens received so far for one request."""

    def __init__(self) -> None:
        self.tokens: list[np.ndarray] = []
        self.logprobs: list[np.ndarray] = []

    def add(self, chunk: _Chunk) -> None:
        meta = chunk.meta_info
        logprobs: Iterable[float] | None = meta.output_token_sampling_logprobs
        if logprobs is None:
            logprobs = [entry[0] for entry in meta.output_token_logprobs]
        self.tokens.append(int32(chunk.output_ids))
        self.logprobs.append(float32(logprobs))

    def joined(self) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and log-probs, equally many: an aborted request may report a token without its log-prob."""
        tokens = np.concatenate([int32(()), *self.tokens])
        logprobs = np.concatenate([float32(()), *self.logprobs])
        n = min(len(tokens), len(logprobs))
        return tokens[:n], logprobs[:n]


class ServerClient:
    """Asynchronous client of one server, for one event loop: `async with`, or `close()` at the end.

    `generate` and `score` raise ServerLost or ServerRefused. The other calls raise ServerSaid if the server answered with an
    error, else MegarlError.
    """

    def __init__(
        self, address: ServerAddress, api_key: str, admin_key: str, timeout_s: float = REQUEST_LIMIT_S
    ) -> None:
        """timeout_s: for one request to its last token, and one call that moves weights."""
        self.address = address
        self._api_key, self._admin_key = api_key, admin_key
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Drop all connections; the server aborts the requests on them."""
        session, self._session = self._session, None
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
        ignore_eos: bool = False,
        routing_from: int | None = None,
    ) -> Generation:
        """Sample until a stop token, the model's own end token, or `max_new_tokens`.

        cache_salt: requests with different salts share no cached prefixes. ignore_eos: go on to `max_new_tokens`
        (benchmarks). routing_from: also return the experts chosen from this position of `input_ids` on. Cancelling aborts the
        request on the server.
        """
        sampling: dict[str, object] = {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "stop_token_ids": list(stop_token_ids),
            "ignore_eos": ignore_eos,
        }
        body: dict[str, object] = {
            "input_ids": input_ids.tolist() if isinstance(input_ids, np.ndarray) else list(input_ids),
            "sampling_params": sampling,
            "return_logprob": True,
            "cache_salt": cache_salt,
            "stream": True,
        }
        if routing_from is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": routing_from}
        if top_p < 1.0:
            body["return_sampling_mask"] = True
            sampling["top_k"] = TOP_K_WITH_TOP_P
        received = _Received()
        async with self._sampling(body, received) as reply:
            async for event in events(reply.content.iter_any()):
                chunk = _decode_chunk(event)
                if chunk.error is not None:
                    raise self._refusal_or_loss(chunk.error.code, chunk.error.message, received)
                received.add(chunk)
                if (finish := chunk.meta_info.finish_reason) is not None:
                    return self._finished(finish, chunk.meta_info, received)
        raise ServerLost(f"{self.address.url} ended a stream before its last token", *received.joined())

    async def score(
        self,
        sequences: Sequence[np.ndarray],
        firsts: Sequence[int],
        cache_salt: str,
        against: int | None = None,
        routing: bool = False,
    ) -> list[Prefill]:
        """Return log-probs, at temperature 1, of the tokens of each sequence [n] from its position `first` (at least 1) on.

        The part before `first` may come from cached prefixes of the same salt; what is scored is computed anew, because
        SGLang matches prefixes only up to `logprob_start_len`. The one token that every request must sample is ignored.
        against: also score this token in each place. routing: also return the experts chosen for all tokens.
        """
        body: dict[str, object] = {
            "input_ids": [s.tolist() for s in sequences],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": [first - 1 for first in firsts],
            "cache_salt": [cache_salt] * len(sequences),
        }
        if against is not None:
            body["token_ids_logprob"] = [[against]] * len(sequences)
        if routing:
            body |= {"return_routed_experts": True, "routed_experts_start_len": 0}
        nothing = _Received()
        async with self._sampling(body, nothing) as reply:
            replies = msgspec.json.decode(await reply.read())
        for each in replies:
            finish = each["meta_info"]["finish_reason"]
            if finish["type"] == "abort":
                reason = f"aborted a request: {finish.get('message')}"
                raise self._refusal_or_loss(finish.get("status_code") or 500, reason, nothing)
        return [_prefill(each["meta_info"]) for each in replies]

    @asynccontextmanager
    async def _sampling(self, body: dict[str, object], received: _Received) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield a good reply to a request for tokens. A failure while it is read becomes ServerLost with what was received."""
        limit = aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=CONNECT_LIMIT_S)
        url = self.address.url
        try:
            async with self._request("/generate", body, self._api_key, limit) as reply:
                if reply.status != 200:
                    raise self._refusal_or_loss(reply.status, await reply.text(), received)
                yield reply
        except TimeoutError:
            reason = f"{url} did not finish a request within {self._timeout_s:g} s"
            raise ServerLost(reason, *received.joined()) from None
        except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
            raise ServerLost(f"{url} was lost: {type(error).__name__}: {error}", *received.joined()) from None

    def _finished(self, finish: _Finish, meta: _Meta, received: _Received) -> Generation:
        tokens, logprobs = received.joined()
        if finish.type == "abort":
            if finish.status_code in REFUSALS:
                raise ServerRefused(f"{self.address.url} refused a request: {finish.message}")
            # A request aborted while its server was paused still gets one token, from weights that may be half replaced.
            raise ServerLost(f"{self.address.url} aborted a request: {finish.message}", tokens[:-1], logprobs[:-1])
        spans = tuple(VersionSpan(int(s.version), s.start, s.end) for s in meta.weight_versions)
        return Generation(tokens, logprobs, spans, finish.type, meta.routed_experts)

    def _refusal_or_loss(self, status: int, text: str, received: _Received) -> MegarlError:
        if status in REFUSALS:
            return ServerRefused(f"{self.address.url} refused a request ({status}): {text[:500]}")
        return ServerLost(f"{self.address.url} answered with status {status}: {text[:500]}", *received.joined())

    async def health(self) -> bool:
        """Return whether the server says within HEALTH_LIMIT_S that it takes requests. Needs no key."""
        try:
            await self._call("ask for its health", "/health", None, HEALTH_LIMIT_S, "")
        except MegarlError:
            return False
        return True

    async def warm_up(self) -> None:
        """Generate one token."""
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}}
        await self._call("generate a token", "/generate", body, self._timeout_s, self._api_key)

    async def pause(self, mode: str) -> None:
        """Stop all work on requests. mode: in_place or retract."""
        await self._call("pause", "/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._call("continue", "/continue_generation", {"torch_empty_cache": False})

    async def abort_all(self) -> None:
        """Abort every request on the server; each raises ServerLost at its caller."""
        await self._call("abort", "/abort_request", {"abort_all": True})

    async def served_version(self) -> int:
        """Return the version that the server labels tokens with; -1 if nothing was published to this process."""
        said = await self._call("ask for its version", "/model_info", key=self._api_key)
        return int(said["weight_version"])

    async def begin(self) -> None:
        """Open an update, after closing one that a lost learner left open."""
        try:
            await self._call("begin", "/begin_weight_update", {})
        except ServerSaid as error:
            if "already open" not in str(error):
                raise
            await self.end()
            await self._call("begin", "/begin_weight_update", {})

    async def end(self) -> None:
        await self._call("end", "/end_weight_update", {}, self._timeout_s)

    async def join_group(self, name: str, master: str, port: int, first_rank: int, world: int, backend: str) -> None:
        """Make the server's tensor-parallel ranks ranks `first_rank` … of a process group with the learner's rank 0."""
        body = {
            "master_address": master,
            "master_port": port,
            "rank_offset": first_rank,
            "world_size": world,
            "group_name": name,
            "backend": backend,
        }
        await self._call("form a process group", "/init_weights_update_group", body, self._timeout_s)

    async def leave_group(self, name: str) -> None:
        await self._call("leave a process group", "/destroy_weights_update_group", {"group_name": name})

    async def receive(
        self, names: list[str], dtypes: list[str], shapes: list[list[int]], group: str, complete: int | None
    ) -> None:
        """Take part in one broadcast of a bucket. complete: the version, if this is its last bucket."""
        body = {"names": names, "dtypes": dtypes, "shapes": shapes, "group_name": group}
        path = "/update_weights_from_distributed"
        await self._call("transfer", path, body | _bucket(complete), self._timeout_s)

    async def take(self, handles: list[str], complete: int | None) -> None:
        """Copy a bucket from the learner's memory through one handle (cuda_ipc.py) per server rank. complete: see `receive`."""
        body = {"serialized_named_tensors": handles} | _bucket(complete)
        await self._call("hand over", "/update_weights_from_tensor", body, self._timeout_s)

    async def load(self, path: str, version: int) -> None:
        """Load all weights from a Hugging Face directory."""
        body = {"model_path": path, "flush_cache": False, "weight_version": str(version)}
        await self._call("load from disk", "/update_weights_from_disk", body, self._timeout_s)

    async def checksums(self) -> tuple[str, dict[str, str] | None]:
        """Return one checksum over all ranks, and each parameter's with tensor_parallel 1, where a rank holds it whole."""
        said = await self._call("checksum", "/weights_checker", {"action": "checksum"}, self._timeout_s)
        ranks = said["ranks"]
        return said["per_engine_checksum"], ranks[0]["checksums"] if len(ranks) == 1 else None

    async def device_identity(self) -> DeviceIdentity:
        """Return the server's machine and GPUs."""
        return msgspec.convert(await self._call("ask for its devices", "/device_identity"), DeviceIdentity)

    async def release_memory(self) -> None:
        """Release the memory of keys and values of a server paused with its requests retracted. Repeating it is harmless."""
        await self._call("release memory", "/release_memory_occupation", {"tags": ["kv_cache"]})

    async def resume_memory(self) -> None:
        """Take that memory back. Repeating it, or calling it on a server that released nothing, is harmless."""
        await self._call("resume memory", "/resume_memory_occupation", {"tags": ["kv_cache"]})

    def error(self, step: str, what: str) -> MegarlError:
        return MegarlError(f"server {self.address.id} ({self.address.url}): {step}: {what}")

    async def _call(
        self, step: str, path: str, body: object = None, limit_s: float | None = None, key: str | None = None
    ) -> Any:
        """Return the reply's JSON, None if it has none. Without a body this is a GET. key: default the admin key."""
        limit_s = min(self._timeout_s, CONTROL_LIMIT_S) if limit_s is None else limit_s
        key, limit = self._admin_key if key is None else key, aiohttp.ClientTimeout(total=limit_s)
        try:
            async with self._request(path, body, key, limit) as reply:
                text = await reply.text(errors="replace")
        except TimeoutError:
            setting = " (weights.timeout_s)" if limit_s == self._timeout_s else ""
            raise self.error(step, f"no answer within {limit_s:g} s{setting}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise self.error(step, f"{type(error).__name__}: {error}") from None
        try:
            said = msgspec.json.decode(text)
        except msgspec.DecodeError:
            said = None
        if reply.status != 200:
            fields = said if isinstance(said, dict) else {}
            message = str(fields.get("message") or fields.get("error") or text)
            raise ServerSaid(str(self.error(step, f"{reply.status}: {message[:500]}")))
        return said

    def _request(
        self, path: str, body: object, key: str, limit: aiohttp.ClientTimeout
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        if self._session is None:  # it belongs to the running event loop, so it is made at the first request
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        return self._session.request(
            "GET" if body is None else "POST",
            f"{self.address.url}{path}",
            data=None if body is None else msgspec.json.encode(body),
            headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
            timeout=limit,
            allow_redirects=False,
        )


def _bucket(complete: int | None) -> dict[str, object]:
    """Return what SGLang needs with every bucket; the last one carries the version."""
    version = None if complete is None else str(complete)
    return {"load_format": "flattened_bucket", "flush_cache": False, "weight_version": version}


def _prefill(meta: dict[str, Any]) -> Prefill:
    """Read scores from a reply's meta_info. The first entry has no log-prob, because nothing precedes it."""
    tokens = meta["input_token_logprobs"][1:]
    others = (meta.get("input_token_ids_logprobs") or [])[1:]
    logprobs = np.array([entry[0] for entry in tokens], np.float32)  # None becomes nan
    against = np.array([entry[0][0] for entry in others], np.float32) if others else np.full_like(logprobs, np.nan)
    return Prefill(logprobs, against, int(meta["weight_version"]), meta.get("routed_experts") or "")


CLOSE_LIMIT_S = 5.0

type Call[T] = Callable[[ServerClient], Coroutine[object, object, T]]


class Fleet:
    """Synchronous calls to several servers at once, to bring them to weights of `version`.

    An event loop in its own thread makes the calls. `close` ends the thread before any later fork; a process that ends
    without `close` does not wait for it.
    """

    def __init__(self, servers: Iterable[ServerClient], version: int) -> None:
        self.servers, self.version = {s.address.id: s for s in servers}, version
        self._loop, self._over = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="publish", daemon=True)
        self._thread.start()

    def start[T](self, ids: Iterable[int], call: Call[T]) -> dict[int, Future[T]]:
        return {i: asyncio.run_coroutine_threadsafe(self._named(call, self.servers[i]), self._loop) for i in ids}

    def each[T](self, ids: Iterable[int], call: Call[T]) -> tuple[dict[int, T], dict[int, str]]:
        """Return results and texts of errors by server id."""
        results, errors = collect(self.start(ids, call))
        return results, {i: str(error) for i, error in errors.items()}

    def close(self) -> None:
        """Drop all connections and the calls on them."""
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(CLOSE_LIMIT_S)

    async def _named[T](self, call: Call[T], server: ServerClient) -> T:
        """Run the call; its error also names the version."""
        try:
            return await call(server)
        except MegarlError as error:
            error.args = (f"publishing version {self.version} to {error}",)
            raise

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._until_closed())

    async def _until_closed(self) -> None:
        await self._over.wait()
        for server in self.servers.values():
            await server.close()


def collect[T](futures: dict[int, Future[T]]) -> tuple[dict[int, T], dict[int, MegarlError]]:
    """Wait for all of them; each call has its own limit."""
    results: dict[int, T] = {}
    errors: dict[int, MegarlError] = {}
    for i, future in futures.items():
        try:
            results[i] = future.result()
        except MegarlError as error:
            errors[i] = error
    return results, errors
