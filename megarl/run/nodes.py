"""A node's resources for a run: address, GPUs, cores, memory and free ports, determined
on the node itself.

one machine        this_node(…)
a Slurm job        `python -m megarl.run.nodes …` in a step over all nodes
                       ─► lines of JSON ─► Nodes
"""

import os
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import batched
from pathlib import Path

import msgspec
import psutil

from megarl.core.base import terminal
from megarl.core.base.errors import MegarlError
from megarl.run import devices
from megarl.run.process import free_ports

LOOPBACK = "127.0.0.1"
DISCARD = 9
"""The port of the discard protocol; nothing is sent to it."""
OF_SLURM = "slurm"
"""Used in place of an interface's name: the interface by which Slurm reaches the node.
"""


@dataclass(frozen=True)
class Node:
    """A node. `name` is Slurm's, or this machine's. Roles listen on `address`, which
    belongs to network interface `interface`. gpus: names for CUDA_VISIBLE_DEVICES.
    memory: all that we may use, in bytes. ports: free ones. host: the machine's name,
    which several nodes of a test may share. kinds, capabilities: of its GPUs, such as
    NVIDIA GB200 and 10.0.
    """

    name: str
    host: str
    address: str
    interface: str
    gpus: tuple[str, ...]
    cores: int
    memory: int
    ports: tuple[int, ...]
    kinds: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()


def this_node(ports: int, interface: str, peer: str = "") -> Node:
    """Describe this machine. interface, peer: see `address_of`."""
    address = address_of(interface, peer)
    host = socket.gethostname().split(".")[0]
    return Node(
        name=os.environ.get("SLURMD_NODENAME", host),
        host=host,
        address=address,
        interface=_interface_of(address),
        gpus=devices.gpus(),
        cores=len(os.sched_getaffinity(0)),
        memory=memory(),
        ports=tuple(free_ports(ports, address)),
        kinds=devices.kinds(),
        capabilities=tuple(sorted(devices.capabilities())),
    )


def _interface_of(address: str) -> str:
    """Return the network interface that has this address."""
    for name, entries in psutil.net_if_addrs().items():
        if address in [entry.address for entry in entries]:
            return name
    raise LookupError(f"no network interface has the address {address}")


CGROUP = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")


def memory() -> int:
    """Return the bytes of memory that this process may use: the machine's, or less by a
    limit of its control groups. Slurm kills processes of a job that exceed its --mem,
    and a container engine those of a container.
    """
    limits = [psutil.virtual_memory().total]
    with suppress(OSError):
        for line in CGROUP.read_text().splitlines():
            # number:controllers:path; version 2 names no controllers
            _, controllers, path = line.split(":", 2)
            root = CGROUPS
            name = "memory.max"
            if controllers:  # version 1
                if "memory" not in controllers.split(","):
                    continue
                root = CGROUPS / "memory"
                name = "memory.limit_in_bytes"
            ours = root / path.lstrip("/")
            for folder in (ours, *ours.parents):  # the limits of groups around ours hold too
                with suppress(OSError, ValueError):  # not there, or "max"
                    limits.append(int((folder / name).read_text()))
    return min(limits)


def address_of(interface: str, peer: str = "") -> str:
    """Return the address of this interface or, for OF_SLURM, of the one that Slurm
    uses; loopback without a name or a job. peer: an address on Slurm's network; in a
    step it is known anyway. MegarlError if there is no such interface with an IPv4
    address.
    """
    supervisor = peer or os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "")  # in steps
    if not interface or (interface == OF_SLURM and not supervisor):
        return LOOPBACK
    if interface == OF_SLURM:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            try:
                s.connect((supervisor, DISCARD))  # sends nothing: the kernel chooses the route
            except OSError as error:
                raise MegarlError(
                    f"run.interface: slurm: no IPv4 route to {supervisor} ({error.strerror}); name"
                    " an IPv4 interface (`ip -4 address` lists them)"
                ) from None
            return str(s.getsockname()[0])
    interfaces = psutil.net_if_addrs()
    for entry in interfaces.get(interface, []):
        if entry.family == socket.AF_INET:
            return entry.address
    raise MegarlError(
        f"run.interface: {interface!r} is not a network interface with an IPv4 address of"
        f" {socket.gethostname()}, which has {', '.join(sorted(interfaces))}"
    )


GPUS_A_LINE = 12
PORTS_A_LINE = 64
"""These keep a line below 1,024 bytes, even with UUIDs as names of GPUs: srun
interleaves longer lines of several nodes.
"""


def encoded_lines(node: Node) -> Iterator[bytes]:
    """Encode a node as lines for `gathered`, each with a part of its GPUs or ports."""
    bare = replace(node, gpus=(), ports=())
    gpus = (replace(bare, gpus=part) for part in batched(node.gpus, GPUS_A_LINE))
    ports = (replace(bare, ports=part) for part in batched(node.ports, PORTS_A_LINE))
    for line in (bare, *gpus, *ports):
        yield msgspec.json.encode(line) + b"\n"


def gathered(lines: Iterable[str]) -> dict[str, Node]:
    """Decode the lines of several nodes, join each node's GPUs and ports, and return
    the nodes by name. Other lines, of a site's prologue, are skipped.
    """
    nodes: dict[str, Node] = {}
    for line in lines:
        with suppress(msgspec.MsgspecError):
            part = msgspec.json.decode(line, type=Node)
            node = nodes.setdefault(part.name, replace(part, gpus=(), ports=()))
            nodes[part.name] = replace(
                node, gpus=node.gpus + part.gpus, ports=node.ports + part.ports
            )
    return nodes


def main(arguments: list[str]) -> int:
    """Print this node as lines of JSON and return 0 if it sees the run directory, else
    2. arguments: how many free ports, the interface, the run directory.
    """
    ports, interface, run = arguments
    try:
        if not (Path(run) / ".lock").exists():
            raise MegarlError(
                f"{Path(run).absolute()} is not there; run.dir must be on a file system that all"
                " nodes share"
            )
        node = this_node(int(ports), interface)
        for line in encoded_lines(node):
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()  # each in one write: lines of nodes do not mix
    except MegarlError as error:
        node_name = os.environ.get("SLURMD_NODENAME", socket.gethostname())
        terminal.say(f"megarl: node {node_name}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
