"""Starts, queries and ends an evaluation's own servers. No weights are published to
them: they keep those they read.

`megarl serve` reads and writes OUT/.servers/: recipe.yaml, endpoints.json,
logs/server/. A failed request is retried on any server. If a server's process ends, so
does the evaluation, with all answers so far on disk.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cached_property

from megarl.checks.start import check_cpu
from megarl.core.base.errors import MegarlError
from megarl.core.base.messages import ServerAddress
from megarl.core.base.rundir import Endpoints, LinkKeys, RunDir, write_atomically
from megarl.core.base.tokenizer import Tokenizer
from megarl.core.client.client import ServerClient
from megarl.core.client.membership import Membership
from megarl.core.client.servable import positions
from megarl.core.evaluation.score import Asker
from megarl.core.recipe import Recipe, dump
from megarl.core.sampling.places import Places
from megarl.core.sampling.sampler import Sampler
from megarl.run.launcher import LocalLauncher, LocalProcess, task
from megarl.run.logs import last_lines, log_of
from megarl.run.placement import place_servers
from megarl.run.restart import Role
from megarl.tasks.agents.registry import TaskAgents
from megarl.tasks.environments.registry import TaskEnvironments
from megarl.tasks.graders.grader import TaskGraders

WATCH_S = 1.0
UNCHANGED = -1  # the version of weights that a server has read from a directory


@dataclass(frozen=True)
class OwnServers:
    """Servers that are running and ready."""

    recipe: Recipe
    endpoints: Endpoints
    processes: Sequence[LocalProcess]

    @cached_property
    def clients(self) -> dict[int, ServerClient]:
        """The servers' clients by id."""
        width = self.recipe.resources.server_tensor_parallel
        keys = (self.endpoints.api_key, self.endpoints.admin_key)
        return {
            n: ServerClient(ServerAddress(id=n, url=url, tensor_parallel=width), *keys)
            for n, url in enumerate(self.endpoints.servers)
        }

    @cached_property
    def places(self) -> Places:
        """The places for requests on them. A server gets requests once it has published
        weights, and those that it has read count as such.
        """
        members = Membership([client.address for client in self.clients.values()])
        for n in self.clients:
            members.answered(n)
            members.publish([n], UNCHANGED, "")
            members.published(n, UNCHANGED, "", "")
        return Places(members, self.recipe.serving.max_running_requests)

    @asynccontextmanager
    async def asker(self, tokenizer: Tokenizer) -> AsyncIterator[Asker]:
        """Yield an Asker, which queries these servers and grades their answers. After
        the block graders, environments, agents and clients are closed.
        """
        recipe = self.recipe
        ids = set(self.clients)
        graders = TaskGraders(recipe, tokenizer.decode)
        environments = TaskEnvironments(recipe, tokenizer)
        agents = TaskAgents(recipe, tokenizer)
        sampler = Sampler(recipe, tokenizer, self, environments, agents, positions(recipe))
        at_once = self.places.limit * len(ids)
        salt = secrets.token_hex(8)  # of cached prefixes, which no other client shares then
        try:
            yield Asker(recipe, tokenizer, sampler, graders, ids, salt, at_once)
        finally:
            graders.close()
            environments.close()
            await agents.close()
            for client in self.clients.values():
                await client.close()

    def life(self, server: int) -> int:
        """Return 0, as the number would change only for a server that is started again,
        and one that has ended is not.
        """
        return 0

    def server_lost(self, server: int, life: int, reason: str) -> None:
        """Do nothing: the request is retried within MAX_RETRIES, and `watch` notices a
        server that is gone for good.
        """

    async def watch(self) -> None:
        """Watch the servers until cancelled. MegarlError when a server has ended."""
        while True:
            self.check_alive()
            await asyncio.sleep(WATCH_S)

    def check_alive(self) -> None:
        """Raise MegarlError, with the end of its log, if a server has ended."""
        for n, process in enumerate(self.processes):
            status = process.status()
            if status is None:
                continue
            log = log_of(RunDir(self.recipe.run.path), Role("server", n))
            lines = [] if log is None else last_lines(log)
            end = "\n  ".join(lines)
            raise MegarlError(
                f"server {n} has ended with status {status}; the end of {log}:\n  {end}"
            )


@contextmanager
def own_servers(recipe: Recipe) -> Iterator[OwnServers]:
    """Start servers, wait until they are ready, and end them after the block.
    MegarlError says why one does not start.
    """
    rundir = RunDir(recipe.run.path)
    launcher = LocalLauncher()
    (node,) = launcher.survey(recipe.resources.servers)  # this machine, with a port for each
    placed = place_servers(recipe, node)
    if not node.gpus:
        count = recipe.resources.servers * recipe.resources.server_tensor_parallel
        check_cpu(recipe, recipe.model.path, {"server processes": count}, node.cores)
    rundir.logs.mkdir(parents=True, exist_ok=True)
    write_atomically(rundir.recipe, dump(recipe).encode())
    urls = tuple(f"http://{node.address}:{port}" for port in node.ports)
    endpoints = Endpoints(
        session="evaluation",
        controller="",
        servers=urls,
        api_key=secrets.token_hex(16),
        admin_key=secrets.token_hex(16),
        link=LinkKeys.new(),
        rendezvous_port=0,
    )
    rundir.write_endpoints(endpoints)
    processes: list[LocalProcess] = []
    try:
        for n, port in enumerate(node.ports):
            role = Role("server", n)
            server_task = task(recipe, rundir, role, port, placed[role])
            processes.append(launcher.start(server_task))
        servers = OwnServers(recipe, endpoints, processes)
        until = time.monotonic() + recipe.start_limit_s
        for url, process in zip(urls, processes, strict=True):
            try:
                wait_ready(url, max(0.0, until - time.monotonic()), process.status)
            except MegarlError:
                servers.check_alive()  # if the server has ended, this error has its log's end
                raise
        yield servers
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait_gone()
        rundir.endpoints_file.unlink(missing_ok=True)


POLL_S = 0.1


def wait_ready(
    url: str, limit_s: float, exit_code: Callable[[], int | None] = lambda: None
) -> float:
    """Wait until the server at `url` is ready; return the seconds that took.
    MegarlError if it has ended, or after `limit_s` seconds. exit_code: returns the
    server's exit status, None while it runs.
    """

    async def wait() -> float:
        """Ask for the server's health every POLL_S seconds, as `wait_ready` says."""
        start = time.monotonic()
        async with ServerClient(ServerAddress(id=0, url=url), "", "", limit_s) as client:
            while not await client.health():
                code = exit_code()
                if code is not None:
                    raise MegarlError(
                        f"the server for {url} ended with status {code} before it was ready; its"
                        " log says why"
                    )
                if time.monotonic() - start > limit_s:
                    raise MegarlError(
                        f"the server at {url} was not ready within {limit_s:g} s; if it only needs"
                        " more, raise weights.timeout_s"
                    )
                await asyncio.sleep(POLL_S)
        return time.monotonic() - start

    return asyncio.run(wait())
