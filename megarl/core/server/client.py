"""One SGLang server as the controller sees it: token ids in; ids, behaviour log-probs and weight versions out, streamed.

    client = ServerClient("http://127.0.0.1:30000", api_key, admin_key, timeout_s=3600)
    try:
        generation = await client.generate(prompt, 256, temperature=1.0, stop_token_ids=[2], cache_salt="17")
    except ServerLost as lost:      # its tokens go on elsewhere: prompt + lost.tokens
        ...

The server sends disjoint chunks of `serving.stream_interval` tokens, so what a lost server costs is at most that many tokens
a request. A chunk is parsed once, into numpy arrays; nothing walks over tokens in Python.

Behaviour log-probs are those of the distribution that was sampled from: SGLang takes them after dividing by the temperature,
and with top_p < 1 its sampling support is asked for, whose log-probs are renormalised over what top_p left (of the 4096
likeliest tokens). Greedy requests (temperature 0) record the log-prob at temperature 1.

`Server` has the calls that replace weights and free memory, and `Fleet` makes them of all servers at once:

    fleet.each("pause", lambda server: server.pause("in_place"))  ──►  results and errors, by server id

Every call has a limit, and its error names the step, the server and the version. Calls go to all servers in parallel, so a
dead server costs the others nothing but its limit.
"""

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self
from urllib.parse import urlsplit

import aiohttp
import msgspec
import numpy as np

from megarl.core.base.device import DeviceIdentity
from megarl.core.base.errors import MegarlError
from megarl.core.base.messages import ServerAddress
from megarl.core.base.types import float32, int32

CONNECT_LIMIT_S = 10.0
HEALTH_LIMIT_S, ABORT_LIMIT_S = 5.0, 30.0
KEEP_ALIVE_S = 2.0
"""Idle connections are not used again after this; the server closes them after 5 s, and a request on a closed one is lost."""
REFUSALS = frozenset({400, 401, 403, 404, 413, 422})
TOP_K_WITH_TOP_P = 4096
"""SGLang tells the sampling support only of a bounded number of candidates; top_p seldom leaves as many."""


class Span(NamedTuple):
    """Completion tokens [start, end) were sampled with weights of `version`."""

    version: int
    start: int
    end: int


class Generation(NamedTuple):
    """A finished request. tokens [n] int32, the stop token included; logprobs [n] float32; spans cover 0 … n in order.
    routing: if it was asked for, the chosen experts (RoutedLayers), else ""."""

    tokens: np.ndarray
    logprobs: np.ndarray
    spans: tuple[Span, ...]
    finish: Literal["stop", "length"]
    routing: str = ""


class Prefill(NamedTuple):
    """Scores of given tokens. logprobs, against [n] float32: of the tokens, and of one other token in each place (all nan if
    none was named); nan where the server had no finite number. version: of the weights. routing: as of Generation."""

    logprobs: np.ndarray
    against: np.ndarray
    version: int
    routing: str = ""


class ServerLost(MegarlError):
    """The server went away, timed out or aborted the request. `tokens`, `logprobs`: what had arrived before, maybe nothing."""

    def __init__(self, reason: str, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        super().__init__(reason)
        self.tokens = tokens
        self.logprobs = logprobs


class ServerRefused(MegarlError):
    """The server says that the request itself is wrong; the same one would be refused elsewhere too."""


class _VersionSpan(msgspec.Struct):
    version: str
    start: int
    end: int


class _Finish(msgspec.Struct):
    type: str
    message: str | None = None
    status_code: int | None = None


class _Meta(msgspec.Struct):
    finish_reason: _Finish | None = None
    output_token_logprobs: list[tuple[float, int, None]] = []
    output_token_sampling_logprobs: list[float] | None = None
    weight_versions: list[_VersionSpan] = []
    routed_experts: str = ""


class _Error(msgspec.Struct):
    message: str = ""
    code: int = 500


class _Chunk(msgspec.Struct):
    """What is read of one event; the decoder passes over the rest."""

    output_ids: list[int] = []
    meta_info: _Meta = msgspec.field(default_factory=_Meta)
    error: _Error | None = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode
_PREFIX, _END, _DONE = b"data: ", b"\n\n", b"[DONE]"


async def events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Bodies of server-sent events in a byte stream cut anywhere; ends at `[DONE]` or with the stream."""
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
    """Tokens of one request so far."""

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
        """Equally long: an aborted request may report a token without its log-prob."""
        tokens = np.concatenate([int32(()), *self.tokens])
        logprobs = np.concatenate([float32(()), *self.logprobs])
        n = min(len(tokens), len(logprobs))
        return tokens[:n], logprobs[:n]


class ServerClient:
    """Asynchronous client of one server, for one event loop: `async with`, or `close()` at the end."""

    def __init__(self, url: str, api_key: str, admin_key: str, timeout_s: float) -> None:
        """`timeout_s`: limit of one request, from sending to its last token (serving.request_timeout_s)."""
        self.url = url
        self._api = {"Authorization": f"Bearer {api_key}"}
        self._admin = {"Authorization": f"Bearer {admin_key}"}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_LIMIT_S)
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Drop all connections; the server aborts what still runs on them."""
        if self._session is not None:
            await self._session.close()
            self._session = None

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

        cache_salt: requests with different ones never share cached prefixes. ignore_eos: go on to `max_new_tokens` whatever
        is sampled (benchmarks). routing_from: ask for the experts chosen for all tokens but the last, from this one of
        `input_ids` on.
        Raises ServerLost or ServerRefused. Cancelling it aborts the request on the server.
        """
        body: dict[str, Any] = {
            "input_ids": input_ids.tolist() if isinstance(input_ids, np.ndarray) else list(input_ids),
            "sampling_params": {
                "max_new_tokens": max_new_tokens,
                "temperature": temperature,
                "top_p": top_p,
                "stop_token_ids": list(stop_token_ids),
                "ignore_eos": ignore_eos,
            },
            "return_logprob": True,
            "cache_salt": cache_salt,
            "stream": True,
        }
        if routing_from is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": routing_from}
        if top_p < 1.0:
            body["return_sampling_mask"] = True
            body["sampling_params"]["top_k"] = TOP_K_WITH_TOP_P
        received = _Received()
        with self._losses(received):
            async with self._post("/generate", body, self._api, self._timeout) as reply:
                if reply.status != 200:
                    raise self._refusal_or_loss(reply.status, await reply.text(), received)
                async for event in events(reply.content.iter_any()):
                    chunk = _decode_chunk(event)
                    if chunk.error is not None:
                        raise self._refusal_or_loss(chunk.error.code, chunk.error.message, received)
                    if chunk.meta_info.finish_reason is not None:
                        return self._finished(chunk, received)
                    received.add(chunk)
        raise ServerLost(f"{self.url} ended a stream before its last token", *received.joined())

    async def score(
        self,
        sequences: Sequence[np.ndarray],
        firsts: Sequence[int],
        cache_salt: str,
        against: int | None = None,
        routing: bool = False,
    ) -> list[Prefill]:
        """Log-probs, at temperature 1, of the tokens of each sequence [n] from its position `first` (at least 1) on.

        What stands before `first` may come from cached prefixes of the same salt; what is scored is computed anew, for SGLang
        matches a prefix only up to `logprob_start_len`. The one token that every request must sample is ignored.
        against: also score this token in each place. routing: ask for the experts chosen for all tokens.
        Raises ServerLost or ServerRefused.
        """
        body: dict[str, Any] = {
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
        with self._losses(nothing):
            async with self._post("/generate", body, self._api, self._timeout) as reply:
                if reply.status != 200:
                    raise self._refusal_or_loss(reply.status, await reply.text(), nothing)
                replies = msgspec.json.decode(await reply.read())
        for each in replies:
            finish = each["meta_info"]["finish_reason"]
            if finish["type"] == "abort":
                reason = f"aborted a request: {finish.get('message')}"
                raise self._refusal_or_loss(finish.get("status_code") or 500, reason, nothing)
        return [_prefill(each["meta_info"]) for each in replies]

    @contextmanager
    def _losses(self, received: _Received) -> Iterator[None]:
        """What aiohttp raises, as ServerLost with what had been received."""
        try:
            yield
        except TimeoutError:
            raise ServerLost(
                f"{self.url} did not finish a request within {self._timeout_s:g} s (serving.request_timeout_s)",
                *received.joined(),
            ) from None
        except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
            raise ServerLost(f"{self.url} was lost: {type(error).__name__}: {error}", *received.joined()) from None

    def _finished(self, chunk: _Chunk, received: _Received) -> Generation:
        received.add(chunk)
        tokens, logprobs = received.joined()
        finish = chunk.meta_info.finish_reason
        if finish is None or finish.type not in ("stop", "length"):
            reason = finish.message if finish is not None else "no finish reason"
            if finish is not None and finish.status_code in REFUSALS:
                raise ServerRefused(f"{self.url} refused a request: {reason}")
            # A request aborted while its server was paused still gets one token, from weights that may be half replaced.
            raise ServerLost(f"{self.url} aborted a request: {reason}", tokens[:-1], logprobs[:-1])
        spans = tuple(Span(int(s.version), s.start, s.end) for s in chunk.meta_info.weight_versions)
        ended: Literal["stop", "length"] = "stop" if finish.type == "stop" else "length"
        return Generation(tokens, logprobs, spans, ended, chunk.meta_info.routed_experts)

    def _refusal_or_loss(self, status: int, text: str, received: _Received) -> MegarlError:
        if status in REFUSALS:
            return ServerRefused(f"{self.url} refused a request ({status}): {text[:500]}")
        return ServerLost(f"{self.url} answered with status {status}: {text[:500]}", *received.joined())

    async def health(self) -> bool:
        """Whether it says within HEALTH_LIMIT_S that it takes requests."""
        try:
            async with self._connected().get(
                f"{self.url}/health", timeout=aiohttp.ClientTimeout(total=HEALTH_LIMIT_S)
            ) as reply:
                return reply.status == 200
        except (aiohttp.ClientError, OSError):  # TimeoutError is an OSError
            return False

    async def abort_all(self) -> None:
        """Abort every request on the server; each raises ServerLost at its caller. Raises ServerLost or ServerRefused."""
        url, nothing = f"{self.url}/abort_request", _Received().joined()
        limit = aiohttp.ClientTimeout(total=ABORT_LIMIT_S)
        try:
            async with self._post("/abort_request", {"abort_all": True}, self._admin, limit) as reply:
                text = await reply.text()
                if reply.status != 200:
                    raise ServerRefused(f"{url} refused ({reply.status}): {text[:500]}")
        except TimeoutError:
            raise ServerLost(f"{url} did not answer within {ABORT_LIMIT_S:g} s", *nothing) from None
        except (aiohttp.ClientError, OSError) as error:
            raise ServerLost(f"{url}: {type(error).__name__}: {error}", *nothing) from None

    def _post(self, path: str, body: dict[str, Any], headers: dict[str, str], timeout: aiohttp.ClientTimeout) -> Any:
        data = msgspec.json.encode(body)
        headers = headers | {"Content-Type": "application/json"}
        return self._connected().post(f"{self.url}{path}", data=data, headers=headers, timeout=timeout)

    def _connected(self) -> aiohttp.ClientSession:
        """The session belongs to the running event loop, so it is made at the first request."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        return self._session


def _prefill(meta: dict[str, Any]) -> Prefill:
    """From a reply's meta_info. The first entry has no log-prob: nothing that was computed stands before it."""
    tokens = meta["input_token_logprobs"][1:]
    others = (meta.get("input_token_ids_logprobs") or [])[1:]
    logprobs = np.array([entry[0] for entry in tokens], np.float32)  # None becomes nan
    against = np.array([entry[0][0] for entry in others], np.float32) if others else np.full_like(logprobs, np.nan)
    return Prefill(logprobs, against, int(meta["weight_version"]), meta.get("routed_experts") or "")


CONTROL_LIMIT_S = 30.0
"""Of calls whose duration does not depend on the model; weights.timeout_s if that is shorter."""


KV_CACHE = {"tags": ["kv_cache"]}


class Server:
    """The calls of one server. Each raises MegarlError."""

    def __init__(self, address: ServerAddress, version: int, api_key: str, admin_key: str, limit_s: float) -> None:
        self.address = address
        self.version = version
        self._api_key, self._admin_key = api_key, admin_key
        self._limit_s = limit_s
        self._control_s = min(limit_s, CONTROL_LIMIT_S)
        place = urlsplit(address.url)
        self._host, self._port = str(place.hostname), place.port or 80

    def pause(self, mode: str) -> None:
        """No request is worked on from here on; `mode`: in_place or retract."""
        self._call("pause", "/pause_generation", {"mode": mode}, self._control_s)

    def resume(self) -> None:
        self._call("continue", "/continue_generation", {"torch_empty_cache": False}, self._control_s)

    def abort_all(self) -> None:
        self._call("abort", "/abort_request", {"abort_all": True}, self._control_s)

    def served_version(self) -> int:
        """What it labels tokens with; -1 if nothing has been published to this process."""
        return int(
            self._call("ask for its version", "/model_info", None, self._control_s, self._api_key)["weight_version"]
        )

    def begin(self) -> None:
        """Open an update; one that a lost learner left open is closed first."""
        try:
            self._call("begin", "/begin_weight_update", {}, self._control_s)
        except MegarlError as error:
            if "already open" not in str(error):
                raise
            self.end()
            self._call("begin", "/begin_weight_update", {}, self._control_s)

    def end(self) -> None:
        self._call("end", "/end_weight_update", {}, self._limit_s)

    def join_group(self, name: str, master: str, port: int, first_rank: int, world: int, backend: str) -> None:
        """Its tensor-parallel ranks become ranks `first_rank` … of a process group with the learner's rank 0."""
        body = {
            "master_address": master,
            "master_port": port,
            "rank_offset": first_rank,
            "world_size": world,
            "group_name": name,
            "backend": backend,
        }
        self._call("form a process group", "/init_weights_update_group", body, self._limit_s)

    def leave_group(self, name: str) -> None:
        self._call("leave a process group", "/destroy_weights_update_group", {"group_name": name}, self._control_s)

    def receive(
        self, names: list[str], dtypes: list[str], shapes: list[list[int]], group: str, last: bool, flush: bool
    ) -> None:
        """Take part in one broadcast of a bucket. The last one carries the version."""
        body = {
            "names": names,
            "dtypes": dtypes,
            "shapes": shapes,
            "group_name": group,
            "load_format": "flattened_bucket",
            "flush_cache": last and flush,
            "weight_version": str(self.version) if last else None,
        }
        self._call("transfer", "/update_weights_from_distributed", body, self._limit_s)

    def take(self, handles: list[str], last: bool, flush: bool) -> None:
        """Take a bucket out of the learner's memory: a handle (cuda_ipc.py) for each of its ranks. The last one carries the
        version."""
        body = {
            "serialized_named_tensors": handles,
            "load_format": "flattened_bucket",
            "flush_cache": last and flush,
            "weight_version": str(self.version) if last else None,
        }
        self._call("hand over", "/update_weights_from_tensor", body, self._limit_s)

    def whereabouts(self) -> DeviceIdentity:
        """Its machine and GPUs."""
        found = self._call("ask where it is", "/whereabouts", None, self._control_s)
        return msgspec.convert(found, DeviceIdentity)

    def release_memory(self) -> None:
        """Give up the memory of keys and values. Only while it is paused with its requests retracted. May be said twice."""
        self._call("release memory", "/release_memory_occupation", KV_CACHE, self._control_s)

    def resume_memory(self) -> None:
        """Have it again. May be said twice, and to one that never gave it up."""
        self._call("resume memory", "/resume_memory_occupation", KV_CACHE, self._control_s)

    def load(self, path: str, flush: bool) -> None:
        """Load all weights from a Hugging Face directory."""
        body = {"model_path": path, "flush_cache": flush, "weight_version": str(self.version)}
        self._call("load from disk", "/update_weights_from_disk", body, self._limit_s)

    def checksums(self) -> tuple[str, dict[str, str] | None]:
        """One over all its ranks; and by parameter, where one rank has whole parameters (tensor_parallel 1)."""
        reply = self._call("checksum", "/weights_checker", {"action": "checksum"}, self._limit_s)
        ranks = reply["ranks"]
        return reply["per_engine_checksum"], ranks[0]["checksums"] if len(ranks) == 1 else None

    def _call(self, step: str, path: str, body: Any, limit_s: float, key: str = "") -> Any:
        """The reply's JSON (or text). Without a body it is a GET."""
        headers = {"Authorization": f"Bearer {key or self._admin_key}", "Content-Type": "application/json"}
        connection = http.client.HTTPConnection(self._host, self._port, timeout=limit_s)
        try:
            connection.request(
                "GET" if body is None else "POST", path, None if body is None else json.dumps(body), headers
            )
            reply = connection.getresponse()
            text = reply.read().decode()
        except TimeoutError:
            raise self.error(step, f"no answer within {limit_s:g} s (weights.timeout_s)") from None
        except (OSError, http.client.HTTPException) as error:
            raise self.error(step, f"{type(error).__name__}: {error}") from None
        finally:
            connection.close()
        try:
            content = json.loads(text)
        except ValueError:
            content = {"message": text}
        if reply.status != 200:
            message = content.get("message") or content.get("error") or text
            raise ServerSaid(str(self.error(step, f"{reply.status}: {str(message)[:500]}")))
        return content

    def error(self, step: str, what: str) -> MegarlError:
        a = self.address
        return MegarlError(f"publishing version {self.version} to server {a.id} ({a.url}): {step}: {what}")


class ServerSaid(MegarlError):
    """The server answered, and said no: it lives."""


class Fleet:
    """Calls to several servers at once."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self.servers = {s.address.id: s for s in servers}
        self._pool = ThreadPoolExecutor(max_workers=max(1, len(servers)), thread_name_prefix="publish")

    def start[T](self, ids: Sequence[int], call: Callable[[Server], T]) -> dict[int, Future[T]]:
        return {i: self._pool.submit(call, self.servers[i]) for i in ids}

    def each[T](self, ids: Sequence[int], call: Callable[[Server], T]) -> tuple[dict[int, T], dict[int, MegarlError]]:
        """Results and errors by server id."""
        return collect(self.start(ids, call))

    def close(self) -> None:
        self._pool.shutdown(wait=False)


def collect[T](futures: dict[int, Future[T]]) -> tuple[dict[int, T], dict[int, MegarlError]]:
    """Wait for all (each call has its own limit)."""
    results: dict[int, T] = {}
    errors: dict[int, MegarlError] = {}
    for i, future in futures.items():
        try:
            results[i] = future.result()
        except MegarlError as error:
            errors[i] = error
    return results, errors


POLL_S = 0.1


def is_healthy(url: str) -> bool:
    """Whether the server at `url` says within HEALTH_LIMIT_S that it takes requests. Needs no key."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=HEALTH_LIMIT_S) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def wait_ready(url: str, limit_s: float, exit_code: Callable[[], int | None] = lambda: None) -> float:
    """Wait for the server at `url`; seconds waited. `exit_code` tells whether its process has ended (None: it runs).

    MegarlError when it ended or when `limit_s` (serving.start_timeout_s) ran out.
    """
    start = time.monotonic()
    while not is_healthy(url):
        code = exit_code()
        if code is not None:
            raise MegarlError(f"the server for {url} ended with status {code} before it was ready; its log says why")
        if time.monotonic() - start > limit_s:
            raise MegarlError(f"the server at {url} was not ready within {limit_s:g} s (serving.start_timeout_s)")
        time.sleep(POLL_S)
    return time.monotonic() - start
