"""An evaluation's own servers: started, waited for, asked, ended. Nothing is published to them: their weights stay.

    OUT/.servers/     recipe.yaml, endpoints.json, logs/server/: what `megarl serve` reads and writes

A failed request is retried on any server. If a server's process ends, so does the evaluation, with all answers so far on disk.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from megarl.core.base.errors import MegarlError
from megarl.core.base.messages import ServerAddress
from megarl.core.base.rundir import Endpoints, LinkKeys, RunDir, write_atomically
from megarl.core.base.tokenizer import Tokenizer
from megarl.core.recipe import Recipe, dump
from megarl.core.sampling.places import Places
from megarl.core.sampling.sampler import Sampler
from megarl.core.server.client import ServerClient
from megarl.core.server.membership import Membership
from megarl.run.checks import check_cpu
from megarl.run.launcher import LocalLauncher, LocalProcess, task
from megarl.run.nodes import Node
from megarl.run.observe import last_lines, log_of
from megarl.run.placement import place_servers
from megarl.run.restart import Role
from megarl.tasks.environments.registry import TaskEnvironments

WATCH_S = 1.0
UNCHANGED = -1
"""The version of weights that a server read from a directory."""


class OwnServers:
    """Servers that are running and ready."""

    def __init__(self, recipe: Recipe, endpoints: Endpoints, processes: Sequence[LocalProcess]) -> None:
        self._recipe, self._endpoints, self._processes = recipe, endpoints, processes

    @property
    def ids(self) -> set[int]:
        return set(range(len(self._processes)))

    def asked(self, tokenizer: Tokenizer) -> "AskedServers":
        """Return clients of the servers, within the running event loop; `close` them."""
        return AskedServers(self._recipe, self._endpoints, tokenizer)

    async def watch(self) -> None:
        """Watch until cancelled; MegarlError when a server has ended."""
        while True:
            check_alive(self._recipe, self._processes)
            await asyncio.sleep(WATCH_S)


class AskedServers:
    """Clients, places and sampler for servers whose weights do not change."""

    def __init__(self, recipe: Recipe, endpoints: Endpoints, tokenizer: Tokenizer) -> None:
        width = recipe.resources.server_tensor_parallel
        addresses = [ServerAddress(id=n, url=u, tensor_parallel=width) for n, u in enumerate(endpoints.servers)]
        members = Membership(addresses)
        self.clients = {
            a.id: ServerClient(a, endpoints.api_key, endpoints.admin_key, recipe.serving.request_timeout_s)
            for a in addresses
        }
        for n in self.clients:
            members.seen(n)
            members.publish([n], UNCHANGED, "")
            members.published(n, UNCHANGED, "", "")
        self.places = Places(members, recipe.serving.max_running_requests)
        self._environments = TaskEnvironments(recipe, tokenizer)
        self.sampler = Sampler(recipe, tokenizer, self.clients, self.places, self, self._environments)

    def life(self, server: int) -> int:
        return 0

    def server_lost(self, server: int, life: int, reason: str) -> None:
        """Do nothing: the request is retried within MAX_RETRIES, and `watch` notices a server that is gone for good."""

    async def close(self) -> None:
        self._environments.close()
        for client in self.clients.values():
            await client.close()


@contextmanager
def own_servers(recipe: Recipe) -> Iterator[OwnServers]:
    """Start servers, wait until they are ready, and end them with the block. MegarlError says why one does not start."""
    rundir = RunDir(recipe.run.path)
    launcher = LocalLauncher()
    (node,) = launcher.survey(recipe.resources.servers)
    placed = place_servers(recipe, node)
    if not node.gpus:
        count = recipe.resources.servers * recipe.resources.server_tensor_parallel
        check_cpu(recipe, recipe.model.path, {"server processes": count}, node.cores)
    endpoints = _prepared(recipe, rundir, node)
    processes: list[LocalProcess] = []
    try:
        for n, url in enumerate(endpoints.servers):
            role, port = Role("server", n), int(url.rpartition(":")[2])
            processes.append(launcher.start(task(recipe, rundir, role, port, placed[role])))
        _wait(recipe, endpoints, processes)
        yield OwnServers(recipe, endpoints, processes)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait_gone()
        rundir.endpoints_file.unlink(missing_ok=True)


def check_alive(recipe: Recipe, processes: Sequence[LocalProcess]) -> None:
    for n, process in enumerate(processes):
        status = process.status()
        if status is not None:
            log = log_of(RunDir(recipe.run.path), Role("server", n))
            said = "\n  ".join(last_lines(log)) if log is not None else ""
            raise MegarlError(f"server {n} has ended with status {status}; the end of {log}:\n  {said}")


def _prepared(recipe: Recipe, rundir: RunDir, node: Node) -> Endpoints:
    """Write what `megarl serve` reads."""
    rundir.logs.mkdir(parents=True, exist_ok=True)
    write_atomically(rundir.recipe, dump(recipe).encode())
    endpoints = Endpoints(
        session="evaluation",
        controller="",
        servers=tuple(f"http://{node.address}:{port}" for port in node.ports),
        api_key=secrets.token_hex(16),
        admin_key=secrets.token_hex(16),
        link=LinkKeys.new(),
        rendezvous_port=0,
    )
    rundir.write_endpoints(endpoints)
    return endpoints


def _wait(recipe: Recipe, endpoints: Endpoints, processes: Sequence[LocalProcess]) -> None:
    until = time.monotonic() + recipe.serving.start_timeout_s
    for url, process in zip(endpoints.servers, processes, strict=True):
        try:
            wait_ready(url, max(0.0, until - time.monotonic()), process.status)
        except MegarlError:
            check_alive(recipe, processes)
            raise


POLL_S = 0.1


def wait_ready(url: str, limit_s: float, exit_code: Callable[[], int | None] = lambda: None) -> float:
    """Wait for the server at `url` and return the seconds. exit_code: status of its process, None while it runs.

    MegarlError if it ended, or after `limit_s` (serving.start_timeout_s).
    """

    async def wait() -> float:
        start = time.monotonic()
        async with ServerClient(ServerAddress(id=0, url=url), "", "", limit_s) as client:
            while not await client.health():
                code = exit_code()
                if code is not None:
                    raise MegarlError(
                        f"the server for {url} ended with status {code} before it was ready; its log says why"
                    )
                if time.monotonic() - start > limit_s:
                    raise MegarlError(
                        f"the server at {url} was not ready within {limit_s:g} s (serving.start_timeout_s)"
                    )
                await asyncio.sleep(POLL_S)
        return time.monotonic() - start

    return asyncio.run(wait())
