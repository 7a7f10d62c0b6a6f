"""What the learner's ranks share: small values, and torch's rendezvous stores and
process groups.

Stores and groups listen on one network and on no other:

    tcp://10.0.0.5:29500 ──► bound_store ──► a socket that listens there ──► TCPStore
    GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME: the network interface, set by whoever starts
    the roles on several nodes

Neither requires a key. By default both would listen elsewhere: a store on every address
of the machine.
"""

import importlib
import os
import socket

import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous

from megarl.core.base.errors import MegarlError


def from_rank_0[T](value: T) -> T:
    """Return rank 0's value. COLLECTIVE."""
    if dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def bytes_from_rank_0(data: bytes) -> bytes | memoryview:
    """As `from_rank_0`, without pickling, by which each rank would hold a batch of long
    rollouts, gigabytes, three times.
    """
    if dist.get_world_size() == 1:
        return data
    size = torch.tensor([len(data)])
    dist.broadcast(size, src=0)
    received = torch.empty(int(size), dtype=torch.uint8)
    if dist.get_rank() == 0:
        received.numpy().data[:] = data
    dist.broadcast(received, src=0)
    return received.numpy().data


def gathered[T](value: T) -> list[T]:
    """Return each rank's value. COLLECTIVE."""
    if dist.get_world_size() == 1:
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


BACKLOG = 2048
"""Ranks that may connect at the same moment."""


def bound_store(
    host_name: str,
    port: int,
    world_size: int | None = None,
    is_master: bool = False,
    *arguments: object,
    **options: object,
) -> TCPStore:
    """Make a TCPStore with torch's arguments; with port 0 the master takes a free one.
    MegarlError if it cannot listen.
    """
    if is_master:
        try:
            addresses = socket.getaddrinfo(host_name, port, type=socket.SOCK_STREAM)
            family, _, _, _, address = addresses[0]
            listener = socket.create_server(address[:2], family=family, backlog=BACKLOG)
        except OSError as error:
            raise MegarlError(
                f"the ranks cannot meet at {host_name}:{port}: {error.strerror}"
            ) from None
        port = listener.getsockname()[1]
        options["master_listen_fd"] = listener.detach()
    return TCPStore(host_name, port, world_size, is_master, *arguments, **options)


def bind_all() -> None:
    """Make torch use `bound_store` for its own stores (tcp://, env://, torchrun's
    ranks); groups default to loopback.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # "=": exactly this name, not every name that begins with it
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "=lo")
    # by its name: torch.distributed.rendezvous itself is a function
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    for module in (rendezvous, static_tcp_rendezvous):
        vars(module)["TCPStore"] = bound_store
