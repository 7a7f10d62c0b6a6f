"""SGLang's calls that replace weights: one server, or all servers at once.

    fleet.each("pause", lambda server: server.pause("in_place"))  ──►  results and errors, by server id

Every call has a limit, and its error names the step, the server and the version. Calls go to all servers in parallel, so a
dead server costs the others nothing but its limit.
"""

import http.client
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import msgspec

from megarl.core.base.errors import MegarlError
from megarl.core.base.messages import ServerAddress
from megarl.core.base.whereabouts import Whereabouts

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

    def whereabouts(self) -> Whereabouts:
        """Its machine and GPUs."""
        found = self._call("ask where it is", "/whereabouts", None, self._control_s)
        return msgspec.convert(found, Whereabouts)

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
