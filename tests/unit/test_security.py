"""What a recipe and a model directory can make a process do, who may ask a server for
what, and where the keys lie.
"""

import asyncio
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.core import recipe as recipes
from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import Endpoints, LinkKeys, RunDir
from megarl.core.engine import proxy

ENDPOINTS = Endpoints(
    session="s",
    controller="tcp://127.0.0.1:1",
    servers=(),
    api_key="user",
    admin_key="admin",
    metrics_key="metrics",
    link=LinkKeys.new(),
    rendezvous_port=1,
)


# A recipe runs no code.


@pytest.mark.parametrize(
    "value",
    [
        "!!python/object/apply:os.system ['touch {mark}']",
        "!!python/object/new:os.system ['touch {mark}']",
        "!!python/name:os.system",
        "!!python/module:os",
        "!!python/object/apply:subprocess.check_call [[touch, {mark}]]",
    ],
)
def test_yaml_makes_no_objects(value: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    value = value.format(mark=mark)
    file = tmp_path / "recipe.yaml"
    file.write_text(f"run:\n  name: {value}\n")
    with pytest.raises(MegarlError, match=r"recipe\.yaml"):
        recipes.load(str(file))
    with pytest.raises(MegarlError, match=r"run\.name"):
        recipes.load("quickstart", [f"run.name={value}"])
    assert not mark.exists()


# Who may ask a server for what.

CALLS = sorted(proxy.OPEN | proxy.USER | proxy.ADMIN | proxy.METRICS)
KEYS = {
    "none": b"",
    "user": b"Bearer user",
    "admin": b"Bearer admin",
    "metrics": b"Bearer metrics",
    "other": b"Bearer other",
    "bare": b"user",
}


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: " ".join(call))
def test_each_call_wants_its_own_key(call: tuple[str, str], key: str) -> None:
    wanted = {"user": proxy.USER, "admin": proxy.ADMIN, "metrics": proxy.METRICS}
    may = call in proxy.OPEN or call in wanted.get(key, ())
    for handles in (False, True):
        assert proxy.status(*call, KEYS[key], ENDPOINTS, handles) == (200 if may else 401)


def test_without_metrics_nobody_may_ask_for_them() -> None:
    without = msgspec.structs.replace(ENDPOINTS, metrics_key="")
    assert {
        proxy.status("GET", "/metrics", key, without, handles=True)
        for key in (b"", b"Bearer ", *KEYS.values())
    } == {404}


@given(
    st.sampled_from(["GET", "POST", "PUT", "OPTIONS", "HEAD"]),
    st.one_of(
        st.text(),
        st.sampled_from([path for _, path in CALLS]).flatmap(lambda p: st.text().map(p.__add__)),
    ),
)
def test_what_is_not_named_is_closed_to_every_key(method: str, path: str) -> None:
    if (method, path) in CALLS:
        return
    assert {proxy.status(method, path, key, ENDPOINTS, handles=False) for key in KEYS.values()} == {
        404
    }


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    ("shares", "client", "server"),
    [
        (True, "10.0.0.1", "10.0.0.1"),
        (True, "10.0.0.2", "10.0.0.1"),
        (False, "127.0.0.1", "127.0.0.1"),
    ],
)
def test_handles_are_taken_from_this_machine_where_a_learner_shares_it(
    shares: bool, client: str, server: str, key: str
) -> None:
    """And with the admin key. To all others the call that unpickles is not there."""
    said = []

    async def sglang(scope: proxy.Message, receive: proxy.Receive, send: proxy.Send) -> None:
        said.append(200)

    async def send(message: proxy.Message) -> None:
        said.extend([message["status"]] if "status" in message else [])

    async def receive() -> proxy.Message:
        raise AssertionError

    (call,) = proxy.LOCAL
    scope = {
        "type": "http",
        "method": call[0],
        "path": call[1],
        "headers": [(b"authorization", KEYS[key])],
        "client": (client, 50000),
        "server": (server, 30000),
    }
    guard = proxy.Gate(sglang, ENDPOINTS, handles=shares, vocabulary=10)
    asyncio.run(guard(scope, receive, send))
    assert said == [404 if not shares or client != server else 200 if key == "admin" else 401]
    assert guard.refused == (said != [200])


@pytest.mark.parametrize(
    ("client", "answers"), [("10.0.0.1", [200, 404]), ("10.0.0.2", [404, 404])]
)
def test_sglang_freezes_its_garbage_collector_once(client: str, answers: list[int]) -> None:
    """By the call that SGLang itself makes at the end of its start, without a key; not
    from another machine.
    """
    said: list[int] = []

    async def sglang(scope: proxy.Message, receive: proxy.Receive, send: proxy.Send) -> None:
        said.append(200)

    async def send(message: proxy.Message) -> None:
        said.extend([message["status"]] if "status" in message else [])

    async def receive() -> proxy.Message:
        raise AssertionError

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/freeze_gc",
        "headers": [],
        "client": (client, 50000),
        "server": ("10.0.0.1", 30000),
    }
    guard = proxy.Gate(sglang, ENDPOINTS, handles=False, vocabulary=10)
    for _ in answers:
        asyncio.run(guard(scope, receive, send))
    assert said == answers


BODIES = {
    b'{"input_ids": [0, 9], "sampling_params": {"stop_token_ids": [9], "top_p": 1}, "cache_salt": "x"}': (
        200
    ),
    b'{"input_ids": [[0, 9], []], "token_ids_logprob": [[9], null], "sampling_params": [{"logit_bias": {"9": 1}}]}': (
        200
    ),
    b"{}": 200,
    b'{"input_ids": [0, 10]}': 400,
    b'{"input_ids": [0, -1]}': 400,
    b'{"input_ids": [[1], [1, 10, 2]]}': 400,
    b'{"input_ids": [1, 99999999999999999999999]}': 400,
    b'{"input_ids": [1, 2.5]}': 400,
    b'{"input_ids": [1, true]}': 400,
    b'{"input_ids": "12"}': 400,
    b'{"input_ids": [1, [2]]}': 400,
    b'{"input_ids": [1], "token_ids_logprob": [[10]]}': 400,
    b'{"input_ids": [1], "sampling_params": {"stop_token_ids": [10]}}': 400,
    b'{"input_ids": [1], "sampling_params": {"logit_bias": {"10": 1.0}}}': 400,
    b'{"input_ids": [1], "sampling_params": {"logit_bias": {"-1": 1.0}}}': 400,
    b'{"input_ids": [1], "sampling_params": {"top_p": 1.0, "top_k": -1, "logit_bias": {"\xff": 1.0}}}': (
        400
    ),
    b"[" * 100_000: 400,
    b"nonsense": 400,
}


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body[:60].decode())
def test_ids_outside_the_vocabulary_never_reach_the_engine(body: bytes, parts: int) -> None:
    """A proxy for a vocabulary of ten tokens. What it lets through arrives whole."""
    size = -(-len(body) // parts)
    cut = [body[n * size : (n + 1) * size] for n in range(parts)]
    pieces = [
        {"type": "http.request", "body": part, "more_body": n + 1 < parts}
        for n, part in enumerate(cut)
    ]
    said: list[int] = []

    async def sglang(scope: proxy.Message, receive: proxy.Receive, send: proxy.Send) -> None:
        assert (await receive())["body"] == body
        assert (await receive())["type"] == "http.disconnect"
        said.append(200)

    async def send(message: proxy.Message) -> None:
        said.extend([message["status"]] if "status" in message else [])

    async def receive() -> proxy.Message:
        return pieces.pop(0) if pieces else {"type": "http.disconnect"}

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/generate",
        "headers": [(b"authorization", KEYS["user"])],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    asyncio.run(proxy.Gate(sglang, ENDPOINTS, handles=False, vocabulary=10)(scope, receive, send))
    assert said == [BODIES[body]]


# Where the keys lie.


def test_keys_are_for_their_owner_alone(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    rundir.write_endpoints(ENDPOINTS)
    assert rundir.endpoints_file.stat().st_mode & 0o777 == 0o600
    assert rundir.endpoints() == ENDPOINTS


def test_no_two_sessions_have_a_key_in_common() -> None:
    keys = [key for _ in range(3) for key in msgspec.structs.astuple(LinkKeys.new())]
    assert len(set(keys)) == len(keys)
