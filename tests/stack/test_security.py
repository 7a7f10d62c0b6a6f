"""A real run, looked at from outside: where it listens, what it answers without a key,
where its keys can be read.

Its model directory brings code of its own, which nobody may run.
"""

import http.client
import json
import re
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import psutil
import pytest
import zmq

from megarl.core.base.messages import Next, to_frames
from megarl.core.base.rundir import LinkKeys
from megarl.core.engine import proxy
from tests.e2e import runs
from tests.e2e.runs import LiveRun, check_nothing_left

pytestmark = [pytest.mark.stack, pytest.mark.timeout(1200)]

OVERRIDES = (
    "run.steps=1000",
    "resources.learner_ranks=2",
    "evaluation.prompts=8",
    "evaluation.samples=1",
    "batch.prompts=8",
    "checkpoint.every=2",
    "monitor.prometheus=true",
)
OTHERS = stat.S_IRWXG | stat.S_IRWXO


def model_with_code(path: Path, source: Path, mark: Path) -> None:
    """A copy that names Python files of its own as its configuration, model and
    tokenizer.
    """
    shutil.copytree(source, path)
    (path / "own.py").write_text(f"open({str(mark)!r}, 'w')\n")
    names = {
        name: f"own.{name}"
        for name in ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer")
    }
    for file in (path / "config.json", path / "tokenizer_config.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": names}))


@pytest.fixture(scope="module")
def live(workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRun]:
    """A run of all roles, two learner ranks, that has made steps and goes on."""
    folder = tmp_path_factory.mktemp("security")
    data = "runs/quickstart-data"
    shutil.copytree(workplace / data, folder / data)
    model_with_code(folder / "model", folder / data / "init", folder / "mark")
    run = runs.start(folder, "run.name=watched", "model.path=model", *OVERRIDES)
    try:
        run.wait_for(lambda: run.steps() >= 3, "three steps")
        yield run
        run.process.terminate()
        family = run.family()
        ports = run.ports()
        run.finish()
        check_nothing_left(family, ports)
        assert keys_in_files(run) == [], "after the end, with its summary and report"
    finally:
        run.kill()


def secrets_of(run: LiveRun) -> list[str]:
    endpoints = run.rundir.endpoints()
    return [
        endpoints.api_key,
        endpoints.admin_key,
        endpoints.metrics_key,
        *msgspec.structs.astuple(endpoints.link),
    ]


def keys_in_files(run: LiveRun) -> list[Path]:
    """Files of the run, and what it printed, that have one of its keys in them; its
    files of keys not counted.
    """
    keys = [key.encode() for key in secrets_of(run)]
    # Files on their way to their place come and go.
    files = [p for p in run.rundir.path.rglob("*") if p.is_file() and not p.name.startswith(".")]
    _bytes.cache_clear()
    files = [
        p for p in files if p not in (run.rundir.endpoints_file, run.rundir.prometheus / "key")
    ]
    assert len(files) > 10, "logs, metrics, journal and traces are there; others come later"
    return [p for p in (*files, run.output) if any(key in _bytes(p) for key in keys)]


@cache
def _bytes(path: Path) -> bytes:
    """None of a file that has gone meanwhile: the run goes on."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def test_all_sockets_listen_on_loopback(live: LiveRun) -> None:
    listening = {}
    for process in live.family():
        for c in process.net_connections("inet"):
            if c.status == psutil.CONN_LISTEN or (c.type == socket.SOCK_DGRAM and not c.raddr):
                listening[c.laddr] = " ".join(process.cmdline())[-80:]
    assert {address.port for address in listening} >= set(live.ports()), (
        "servers and controller are among them"
    )
    assert live.rundir.endpoints().rendezvous_port in {address.port for address in listening}
    assert {address: who for address, who in listening.items() if address.ip != "127.0.0.1"} == {}


def test_sockets_in_the_file_system_are_closed_to_others(live: LiveRun) -> None:
    paths = {
        Path(str(c.laddr))
        for process in live.family()
        for c in process.net_connections("unix")
        if c.laddr and Path(str(c.laddr)).is_socket()
    }
    assert paths, "SGLang's processes talk through them"
    assert [path for path in paths if path.stat().st_mode & OTHERS] == []


def test_keys_are_in_their_files_and_in_no_command_line(live: LiveRun) -> None:
    for file in (live.rundir.endpoints_file, live.rundir.prometheus / "key"):
        assert file.stat().st_mode & OTHERS == 0
    assert keys_in_files(live) == []
    assert "server_args=" in "".join(
        p.read_text() for p in (live.rundir.logs / "server").glob("*.log")
    )
    lines = [
        " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])
    ]
    assert [line for line in lines if any(key in line for key in secrets_of(live))] == []


def test_code_of_the_model_directory_is_not_run(live: LiveRun) -> None:
    assert not (live.cwd / "mark").exists()


def ask(
    live: LiveRun, method: str, path: str, key: str = "", body: bytes = b"{}", **headers: str
) -> int:
    """The status of a request to the run's server."""
    host, _, port = live.rundir.endpoints().servers[0].removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    try:
        wanted = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {key}"} if key else {}
        )
        connection.request(method, path, body if method == "POST" else None, wanted | headers)
        return connection.getresponse().status
    finally:
        connection.close()


def paths_of_a_server() -> list[str]:
    """List every path that SGLang answers, of its routers one, and those of
    megarl/core/engine/proxy.py.
    """
    (package,) = find_spec("sglang").submodule_search_locations  # type: ignore[union-attr, misc]
    source = (Path(package) / "srt/entrypoints/http_server.py").read_text()
    return sorted(
        {"/device_identity", "/v1/loads", *re.findall(r'@app\.\w+\(\s*"(/[^"]*)"', source)}
    )


def test_nothing_is_answered_without_a_key_but_that_it_is_ready(live: LiveRun) -> None:
    paths = paths_of_a_server()
    assert len(paths) > 60
    assert {path for _, path in proxy.USER | proxy.ADMIN} <= set(paths)
    calls = [(method, path) for path in paths for method in ("GET", "POST", "PUT", "OPTIONS")]
    calls += [
        ("GET", path)
        for path in (
            "/docs",
            "/openapi.json",
            "/metrics/x",
            "/health/../model_info",
            "//model_info",
        )
    ]
    answered = {call for call in calls if ask(live, *call) not in (401, 404)}
    assert answered == {("GET", "/health")}


def test_the_user_key_opens_no_other_call(live: LiveRun) -> None:
    key = live.rundir.endpoints().api_key
    paths = [
        path
        for path in paths_of_a_server()
        if ("POST", path) not in proxy.USER and path != "/health"
    ]
    assert {path for path in paths if ask(live, "POST", path, key) not in (401, 404)} == set()
    assert ask(live, "GET", "/model_info", key) == 200
    assert ask(live, "GET", "/metrics", key) == 401


def test_the_metrics_key_opens_metrics_alone(live: LiveRun) -> None:
    key = live.rundir.endpoints().metrics_key
    assert ask(live, "GET", "/metrics", key) == 200
    paths = [path for path in paths_of_a_server() if path != "/health"]
    answered = {
        (m, path)
        for path in paths
        for m in ("GET", "POST")
        if ask(live, m, path, key) not in (401, 404)
    }
    assert answered == set()


def test_a_host_header_does_not_change_what_is_asked(live: LiveRun) -> None:
    for host in ("x/health?", "x/health#", "x/health\\"):
        assert ask(live, "POST", "/pause_generation", Host=host) in (400, 401)


def test_websockets_are_closed(live: LiveRun) -> None:
    upgrade: dict[str, Any] = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
    }
    assert ask(live, "GET", "/v1/realtime", **upgrade) in (
        403,
        404,
    )


def test_strangers_at_a_server_are_counted_and_the_run_goes_on(live: LiveRun) -> None:
    host, _, port = live.rundir.endpoints().servers[0].removeprefix("http://").partition(":")
    steps = live.steps()
    random = Random(0)
    for size in (1, 100, 100_000):
        # It may hang up before it has read all.
        with (
            suppress(ConnectionError),
            socket.create_connection((host, int(port)), timeout=30) as raw,
        ):
            raw.sendall(random.randbytes(size))
            raw.shutdown(socket.SHUT_WR)
            assert not raw.recv(4096).startswith(b"HTTP/1.1 2")
    for _ in range(8):
        assert ask(live, "POST", "/generate", "nonsense") == 401
    key = live.rundir.endpoints().api_key
    assert (
        ask(live, "POST", "/generate", key, b'{"input_ids": [1, 99999999], "sampling_params": {}}')
        == 400
    )
    (file,) = (live.rundir.logs / "server").glob("*.log")
    counted = [
        int(n)
        for n in re.findall(
            r"requests refused so far: (\d+), this one from 127.0.0.1", file.read_text()
        )
    ]
    assert counted == [2**n for n in range(len(counted))]
    assert counted[-1] >= 8
    live.wait_for(lambda: live.steps() >= steps + 2, "two more steps")


def test_strangers_at_the_controller_are_counted_and_the_run_goes_on(live: LiveRun) -> None:
    endpoints = live.rundir.endpoints()

    def status() -> dict[str, int]:
        return json.loads(live.rundir.status.read_text())

    before = status()["refused_connections"]
    steps = live.steps()
    port = int(endpoints.controller.rpartition(":")[2])
    for data in (b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 8, b"\xff" + bytes(200)):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as raw:
            raw.sendall(data)
    stranger = msgspec.structs.replace(LinkKeys.new(), controller=endpoints.link.controller)
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger = 0
        peer.curve_serverkey = stranger.controller.encode()
        peer.curve_publickey, peer.curve_secretkey = (
            stranger.learner.encode(),
            stranger.learner_secret.encode(),
        )
        peer.connect(endpoints.controller)
        peer.send_multipart([b"", *to_frames(Next(incarnation="x", step=0, version=0))])
        live.wait_for(lambda: status()["refused_connections"] >= before + 4, "a count of all four")
    live.wait_for(lambda: live.steps() >= steps + 2, "two more steps")
    assert status()["malformed_requests"] == 0
    assert [
        process.pid for process in live.family() if time.time() - process.create_time() < 1
    ] == [], "no role died"
