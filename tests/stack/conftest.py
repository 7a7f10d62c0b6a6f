"""One real SGLang server for all tests of this folder, and the same two tiny models in
transformers and in Megatron.

Starting a server costs seconds, so it is started once. A test that changes its weights
says with which version.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from megarl.core import recipe as recipes
from megarl.core.base.messages import Published, ServerAddress
from megarl.core.base.process import die_with_parent
from megarl.core.base.rundir import Endpoints, LinkKeys, RunDir
from megarl.core.client.client import Generation, ServerClient
from megarl.core.recipe import Recipe
from megarl.run.process import free_ports
from megarl.tools.eval.servers import wait_ready
from tests import make
from tests.processes import SERVERS, Forked
from tests.tiny import tiny_llama
from tests.tiny_scores import difference

ROOT = Path(__file__).parents[2]
START_LIMIT_S = 240.0
POSITIONS = 2048


@dataclass
class Running:
    """A live server: `address` of it, `process` of it, and the log it writes."""

    address: ServerAddress
    process: subprocess.Popen[bytes] | Forked
    log: Path

    def cpu_seconds(self) -> float:
        """What its processes have used so far."""
        main = psutil.Process(self.process.pid)
        return sum(sum(p.cpu_times()[:2]) for p in (main, *main.children(recursive=True)))

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@dataclass
class Stack:
    """`models`: name -> transformers model, whose directory is `directory / name`. The
    server starts with `a`.
    """

    directory: Path
    recipe: Recipe
    endpoints: Endpoints
    models: dict[str, Any]
    server: Running

    def client(self) -> ServerClient:
        return client_of(self.server, self.endpoints)

    def difference(self, name: str) -> float:
        """The largest difference of its log-probs from those of the model `name`."""
        return difference(self.server.address.url, self.endpoints, self.models[name])

    def ask[T](self, call: Callable[[ServerClient], Coroutine[Any, Any, T]]) -> T:
        """One call of the server, from synchronous code."""

        async def asked() -> T:
            async with self.client() as client:
                return await call(client)

        return asyncio.run(asked())


def client_of(server: Running, endpoints: Endpoints, timeout_s: float = 120) -> ServerClient:
    return ServerClient(server.address, endpoints.api_key, endpoints.admin_key, timeout_s)


async def under_way(
    client: ServerClient,
    prompt: Sequence[int] | np.ndarray,
    tokens: int,
    cache_salt: str | None = None,
) -> asyncio.Task[Generation]:
    """Begin a request, and return it when its first tokens have come."""
    began = asyncio.Event()
    task = asyncio.create_task(
        client.generate(prompt, tokens, cache_salt=cache_salt, started=began.set)
    )
    await asyncio.wait_for(began.wait(), 60)
    return task


def assert_arrived(published: Published) -> str:
    """Return the checksum of the one server, which has loaded what was published."""
    (result,) = published.results
    assert result.error == ""
    return result.checksum


def stack_recipe(directory: Path, **sections: Any) -> Recipe:
    tree = {
        "run": {"name": "run", "dir": str(directory)},
        "model": {"path": str(directory / "a"), "dtype": "fp32"},
        "length": {"prompt_tokens": 100, "thinking_tokens": [1000, 1400], "answer_tokens": 100},
        "serving": {"kv_tokens": 16384, "max_running_requests": 32},
        "weights": {"timeout_s": 20, "bucket_mb": 1},
    }
    return make.recipe(tree, **sections)


@dataclass(frozen=True)
class Network:
    """Where a server listens: its address there, that network's interface, and the
    command that enters its namespace.
    """

    address: str = "127.0.0.1"
    interface: str = "lo"
    enter: tuple[str, ...] = ()


def serve(
    rundir: RunDir, address: ServerAddress, log: Path, network: Network = Network()
) -> subprocess.Popen[bytes] | Forked:
    """`megarl serve`, in its own process group."""
    arguments = [
        "serve",
        str(rundir.recipe),
        "--index",
        str(address.id),
        "--port",
        address.url.rpartition(":")[2],
    ]
    env = os.environ | {"GLOO_SOCKET_IFNAME": network.interface}
    if not network.enter and not torch.cuda.is_available():
        return SERVERS.megarl(arguments, ROOT, env, log)
    with log.open("ab") as file:
        return subprocess.Popen(
            [*network.enter, sys.executable, "-W", "ignore", "-m", "megarl", *arguments],
            cwd=ROOT,
            env=env,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )


def start_servers(recipe: Recipe, networks: Sequence[Network]) -> tuple[Endpoints, list[Running]]:
    """`megarl serve` on each of these, ready; each in its own process group."""
    rundir = RunDir(recipe.run.path)
    rundir.create()
    ports = free_ports(len(networks))
    urls = [
        f"http://{network.address}:{port}" for network, port in zip(networks, ports, strict=True)
    ]
    endpoints = Endpoints(
        session="test",
        controller="tcp://127.0.0.1:1",
        servers=tuple(urls),
        api_key="user-key",
        admin_key="admin-key",
        link=LinkKeys.new(),
        rendezvous_port=1,
    )
    rundir.write_endpoints(endpoints)
    resources = recipe.resources.model_copy(
        update={"servers": len(networks)}
    )  # a server that it has not is refused
    rundir.recipe.write_text(recipes.dump(recipe.model_copy(update={"resources": resources})))
    servers = []
    for index, (network, url) in enumerate(zip(networks, urls, strict=True)):
        address = ServerAddress(
            id=index, url=url, tensor_parallel=recipe.resources.server_tensor_parallel
        )
        log = rundir.logs / f"server-{index}.log"
        servers.append(Running(address, serve(rundir, address, log, network), log))
    try:
        for server in servers:
            wait_ready(server.address.url, START_LIMIT_S, server.process.poll)
    except BaseException:
        for server in servers:
            server.stop()
            print(server.log.read_text()[-2000:])
        raise
    return endpoints, servers


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


def two_models(directory: Path, make: Callable[..., Any], **overrides: Any) -> dict[str, Any]:
    """Models `a` and `b` of one shape."""
    torch.set_num_threads(1)
    return {
        name: make(directory / name, seed=seed, **overrides) for seed, name in enumerate(("a", "b"))
    }


@contextmanager
def running(directory: Path, models: dict[str, Any], **sections: Any) -> Iterator[Stack]:
    """A server that has started with model `a` of `directory`."""
    recipe = stack_recipe(directory, **sections)
    endpoints, servers = start_servers(recipe, [Network()])
    try:
        yield Stack(directory, recipe, endpoints, models, servers[0])
    finally:
        servers[0].stop()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("stack")
    return directory, two_models(
        directory, tiny_llama, max_position_embeddings=POSITIONS, eos_token_id=None
    )


@pytest.fixture(scope="session")
def stack(models: tuple[Path, dict[str, Any]]) -> Iterator[Stack]:
    with running(*models) as running_stack:
        yield running_stack


@pytest.fixture(scope="module")
def serves_a(stack: Stack) -> None:
    """The server has model `a`, whatever the tests before have published."""
    stack.ask(lambda client: client.load(str(stack.directory / "a"), 0))


@pytest.fixture(scope="module")
def learner(models: tuple[Path, dict[str, Any]]) -> Iterator[Callable[[str], tuple[Any, Any]]]:
    """`learner("b")`: (chunks, family) of a one-rank Megatron learner with that model's
    weights.
    """
    from megarl.core.models import build, family_of, hf, parallel

    directory, _ = models
    model = recipes.from_tree({"model": {"path": str(directory / "a"), "dtype": "fp32"}}).model
    parallel.start(model, seed=0, timeout_s=60)
    family = family_of(directory / "a")
    chunks = build.build(model, directory / "a")

    def with_weights(name: str) -> tuple[Any, Any]:
        hf.load(chunks, family, directory / name)
        return chunks, family

    yield with_weights
    parallel.stop()
