"""torch's stores and groups listen on the address they are given, and on no other."""

import os
import socket
import subprocess
import sys
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

from megarl.core.base.errors import MegarlError
from megarl.core.base.ranks import bound_store

pytestmark = pytest.mark.processes

LIMIT = timedelta(seconds=20)

GROUP = """
import os, psutil, torch.distributed as dist
from megarl.core.base import ranks
from megarl.run.process import free_ports
ranks.bind_all()
port, = free_ports(1, "127.0.0.3")
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.3:{port}", rank=0, world_size=1)
dist.new_group([0])
addresses = {c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}
print(*sorted(addresses), os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"])
"""


def listening() -> set[tuple[str, int]]:
    """Addresses that this process listens on; other tests may have left some, at any
    port.
    """
    return {
        (c.laddr.ip, c.laddr.port)
        for c in psutil.Process().net_connections()
        if c.laddr and c.status == psutil.CONN_LISTEN
    }


def test_a_store_listens_where_it_says() -> None:
    before = listening()
    store = bound_store("127.0.0.2", 0, 2, is_master=True, timeout=LIMIT, wait_for_workers=False)
    assert listening() - before == {("127.0.0.2", store.port)}
    dist.TCPStore("127.0.0.2", store.port, 2, is_master=False, timeout=LIMIT).set("a", "b")
    assert store.get("a") == b"b"
    with (
        pytest.raises(ConnectionRefusedError),
        socket.create_connection(("127.0.0.7", store.port), timeout=5),
    ):
        pass


def test_a_place_where_it_cannot_listen_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            MegarlError, match=rf"cannot meet at 127\.0\.0\.1:{port}: Address already in use"
        ):
            bound_store("127.0.0.1", port, 1, is_master=True)


def test_groups_that_torch_makes_listen_there_and_on_loopback() -> None:
    """In a process of its own: a group opens sockets for the rest of its process's
    life.
    """
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    environment = {k: v for k, v in os.environ.items() if k not in names} | {
        "PYTHONPATH": os.pathsep.join(sys.path)
    }
    done = subprocess.run(
        [sys.executable, "-c", GROUP], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.stdout.split() == ["127.0.0.1", "127.0.0.3", "lo", "=lo"], done.stderr[-2000:]
