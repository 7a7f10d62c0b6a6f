"""Real roles for the other benchmarks: a server alone, and whole runs."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from megarl.core import recipe as recipes
from megarl.core.base.messages import ServerAddress
from megarl.core.base.process import die_with_parent
from megarl.core.base.rundir import Endpoints, LinkKeys, Row, RunDir, latest_rows
from megarl.core.client.client import REQUEST_LIMIT_S, ServerClient
from megarl.core.recipe import Recipe
from megarl.run.process import free_ports
from megarl.tools.eval.servers import wait_ready

ROOT = Path(__file__).parents[1]


class Served(NamedTuple):
    """A server. ready: seconds until it answered."""

    process: subprocess.Popen[bytes]
    endpoints: Endpoints
    ready: float


@contextmanager
def served(
    recipe: Recipe,
    module: str = "megarl",
    limit_s: float | None = None,
    host: str = "127.0.0.1",
    interface: str = "lo",
) -> Iterator[Served]:
    """Run `python -m MODULE serve` with the recipe during the block, and yield the
    server once it is ready. If anything fails meanwhile, the end of its log is printed.
    host, interface: the address where it listens and that network's interface.
    """
    rundir = RunDir(recipe.run.path)
    rundir.create()
    (port,) = free_ports(1)
    url = f"http://{host}:{port}"
    keys = {"api_key": "user", "admin_key": "admin"}
    endpoints = Endpoints(
        session="", controller="", servers=(url,), link=LinkKeys.new(), rendezvous_port=0, **keys
    )
    rundir.write_endpoints(endpoints)
    rundir.recipe.write_text(recipes.dump(recipe))
    file = rundir.logs / "server.log"
    with file.open("wb") as log:
        command = [
            sys.executable,
            "-m",
            module,
            "serve",
            str(rundir.recipe),
            "--index",
            "0",
            "--port",
            str(port),
        ]
        process = subprocess.Popen(
            command,
            env=os.environ | {"GLOO_SOCKET_IFNAME": interface},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    try:
        yield Served(
            process, endpoints, wait_ready(url, limit_s or recipe.start_limit_s, process.poll)
        )
    except Exception:
        print(file.read_text(errors="replace")[-6000:])
        raise
    finally:
        with suppress(ProcessLookupError):  # it has ended; its log says why
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def client_of(endpoints: Endpoints, limit_s: float = REQUEST_LIMIT_S) -> ServerClient:
    address = ServerAddress(id=0, url=endpoints.servers[0])
    return ServerClient(address, endpoints.api_key, endpoints.admin_key, limit_s)


def trained(recipe: Recipe, limit_s: float = 1800) -> list[Row]:
    """Run the recipe; return the rows of its metrics. subprocess.TimeoutExpired after
    so many seconds.
    """
    rundir = RunDir(recipe.run.path)
    file = rundir.path.parent / f"{recipe.run.name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(recipes.dump(recipe))
    output([sys.executable, "-m", "megarl", "train", str(file)], {}, limit_s)
    return latest_rows(rundir.metrics)


def with_trl() -> dict[str, str]:
    """Return the environment variables with which a process finds TRL, and has both
    cores.
    """
    return {
        "OMP_NUM_THREADS": "2",
        "PYTHONPATH": os.pathsep.join([str(ROOT / ".bench"), str(ROOT)]),
    }


def output(command: list[str], environment: dict[str, str], limit_s: float = 1800) -> str:
    """Return the command's output; its errors are shown if it fails.

    subprocess.TimeoutExpired after so many seconds.
    """
    variables = {**os.environ, **environment}
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=limit_s
    )
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
    return done.stdout
