"""Which role runs where, and on which GPUs. Pure.

    node 1    server-0  server-1 … server-7    controller
    node 2    server-8  …                      servers from the first node on;
    …
    node 9    learner ranks 0 … 7              the learner on the last GPUs:
    node 10   learner ranks 8 … 15             part of a node, or whole nodes

A server lies within a node. If it has more GPUs than a node, it takes whole nodes.

With resources.colocate the servers share the learner's GPUs, all on one node: server 0
has those of the first ranks.

A slot is a GPU or, if no node has one, `resources.threads` cores. A single node without
GPUs takes every role regardless.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megarl.core.base.errors import MegarlError
from megarl.core.client.membership import listed
from megarl.core.recipe import Recipe
from megarl.run.devices import needed
from megarl.run.nodes import Node
from megarl.run.restart import Role


@dataclass(frozen=True)
class Place:
    """Where a role runs. gpus: the role's GPUs on each of its nodes, empty without
    GPUs. ranks: the learner's on each node.
    """

    nodes: tuple[Node, ...]
    gpus: tuple[str, ...] = ()
    ranks: int = 1

    @property
    def capabilities(self) -> frozenset[str]:
        """The compute capabilities of its nodes' GPUs, such as 9.0; empty if they are
        not known.
        """
        capabilities: set[str] = set()
        for node in self.nodes:
            capabilities.update(node.capabilities)
        return frozenset(capabilities)


@dataclass
class Allocation:
    """Nodes and their slots: names of GPUs, or empty names for cores. free: the slots
    that no role has yet, by node.
    """

    nodes: Sequence[Node]
    slots: list[list[str]]
    free: list[list[str]] = field(init=False)

    def __post_init__(self) -> None:
        self.free = [list(names) for names in self.slots]

    @property
    def width(self) -> int:
        """The slots of the largest node."""
        return max(map(len, self.slots))

    @property
    def free_slots(self) -> int:
        """The number of slots that are free on all nodes together."""
        return sum(map(len, self.free))

    @property
    def free_by_node(self) -> str:
        """A text such as `node1 8, node2 3`."""
        texts = []
        for node, names in zip(self.nodes, self.free, strict=True):
            texts.append(f"{node.name} {len(names)}")
        return ", ".join(texts)

    def with_free(self, count: int) -> list[int]:
        """Return the nodes that have this many free slots."""
        return [n for n, names in enumerate(self.free) if len(names) >= count]

    def idle(self) -> list[int]:
        """Return the largest nodes that are wholly free, as far as their slots have the
        same names as those of the first: a role has one list of names for all nodes.
        """
        width = self.width
        idle = [
            n for n, names in enumerate(self.free) if len(names) == width and names == self.slots[n]
        ]
        return [n for n in idle if self.free[n] == self.free[idle[0]]]

    def take(self, indices: Sequence[int], count: int) -> Place:
        """Take the first `count` free slots of each of these nodes, whose names are the
        same on all.
        """
        gpus = _named(self.free[indices[0]][:count])
        for n in indices:
            del self.free[n][:count]
        return Place(tuple(self.nodes[n] for n in indices), gpus)


def place(recipe: Recipe, nodes: Sequence[Node]) -> dict[Role, Place]:
    """Place servers from the front, the learner at the end, the controller on the first
    node. MegarlError if they don't fit.
    """
    allocation = Allocation(nodes, _slots(recipe, nodes))
    if allocation.free_slots < needed(recipe):
        raise MegarlError(_too_few(recipe, allocation))
    # before the servers: the learner may take only whole nodes, all alike
    learner = _learner(recipe.resources.learner_ranks, allocation)
    placed = {Role("learner"): learner}
    if recipe.resources.colocate:
        placed |= _colocated(recipe, learner)
        return placed | {Role("controller"): Place((learner.nodes[0],))}
    placed |= _servers(recipe, allocation)
    return placed | {Role("controller"): Place((nodes[0],))}


def _slots(recipe: Recipe, nodes: Sequence[Node]) -> list[list[str]]:
    """Return each node's slots: names of GPUs or, without any, empty names."""
    if any(node.gpus for node in nodes):
        return [list(node.gpus) for node in nodes]
    if len(nodes) == 1:
        return [[""] * needed(recipe)]
    return [[""] * max(1, node.cores // recipe.resources.threads) for node in nodes]


def _colocated(recipe: Recipe, learner: Place) -> dict[Role, Place]:
    """Place the servers on the learner's GPUs."""
    if len(learner.nodes) > 1:
        raise MegarlError(
            f"resources.colocate: {recipe.resources.learner_ranks} learner ranks take"
            f" {len(learner.nodes)} nodes, and only GPUs of one are shared; lower"
            " resources.learner_ranks, or set resources.colocate=false"
        )
    width = recipe.resources.server_tensor_parallel
    return {
        Role("server", i): Place(learner.nodes, learner.gpus[i * width : (i + 1) * width])
        for i in range(recipe.resources.servers)
    }


def place_servers(recipe: Recipe, node: Node) -> dict[Role, Place]:
    """Place an evaluation's servers, alone on one machine. MegarlError if they do not
    fit.
    """
    count = recipe.resources.servers
    width = recipe.resources.server_tensor_parallel
    if node.gpus and len(node.gpus) < count * width:
        raise MegarlError(
            f"resources: {count} servers x {width} GPUs need {count * width}, and {len(node.gpus)}"
            f" are visible ({','.join(node.gpus)}); lower resources.servers or"
            " resources.server_tensor_parallel, or set CUDA_VISIBLE_DEVICES= to serve a tiny model"
            " on the CPU"
        )
    slots = list(node.gpus) or [""] * (count * width)
    return _servers(recipe, Allocation([node], [slots]))


def _servers(recipe: Recipe, allocation: Allocation) -> dict[Role, Place]:
    """Place servers on the first free slots."""
    servers = recipe.resources.servers
    width = recipe.resources.server_tensor_parallel
    node_width = allocation.width
    key = "resources.server_tensor_parallel"
    if width > node_width and width % node_width:
        raise MegarlError(
            f"{key}: {width} GPUs are more than the {node_width} of a node, and such a server takes"
            f" whole nodes; use a multiple of {node_width}"
        )
    node_count = max(1, width // node_width)
    if node_count > 1 and recipe.serving.attention_copies > 1:
        raise MegarlError(
            f"serving.attention_copies: a server of {width} GPUs takes {node_count} nodes, between"
            f" which SGLang would send requests over ports without a key; set it to 1, or {key} to"
            f" at most {node_width}"
        )
    slots_each = width // node_count
    placed = {}
    for i in range(servers):
        candidates = allocation.with_free(width) if node_count == 1 else allocation.idle()
        if len(candidates) < node_count:
            places = "node" if node_count == 1 else f"{node_count} nodes"
            raise MegarlError(
                f"resources: server {i} of {servers} finds no {places} with {slots_each} free"
                f" GPUs (free: {allocation.free_by_node}); it lies within a node or on whole ones:"
                f" choose {key} so that it divides a node's GPUs, or ask for more nodes"
            )
        placed[Role("server", i)] = allocation.take(candidates[:node_count], slots_each)
    return placed


def _learner(ranks: int, allocation: Allocation) -> Place:
    """Place the learner on the last GPUs of the last node, or on whole nodes from the
    end.
    """
    free = allocation.free
    width = len(free[-1])
    if ranks <= width:
        gpus = free[-1][width - ranks :]
        del free[-1][width - ranks :]
        return Place((allocation.nodes[-1],), _named(gpus), ranks)
    node_count = ranks // width if width else 0  # 0: servers have taken all of the last node
    are_unlike = any(names != free[-1] for names in free[-node_count:])
    if not node_count or ranks % width or are_unlike:
        raise MegarlError(
            f"resources.learner_ranks: {ranks} ranks take whole nodes, and the last nodes have"
            f" {', '.join(str(len(names)) for names in free)} GPUs each; use a multiple of a"
            " node's, on nodes with equally many"
        )
    gpus = list(free[-1])
    for names in free[-node_count:]:
        names.clear()
    return Place(tuple(allocation.nodes[-node_count:]), _named(gpus), width)


def _named(slots: Sequence[str]) -> tuple[str, ...]:
    """Return the slots that are GPUs: those of cores have empty names."""
    return tuple(slot for slot in slots if slot)


def _too_few(recipe: Recipe, allocation: Allocation) -> str:
    """Return why the run does not fit, and what to do."""
    resources = recipe.resources
    parts = []
    if not resources.colocate:
        parts.append(f"{resources.servers} servers x {resources.server_tensor_parallel} GPUs")
    parts.append(f"{resources.learner_ranks} learner ranks")
    need = f"resources: {' + '.join(parts)} need {needed(recipe)} GPUs, and "
    lower = "lower resources.servers, resources.server_tensor_parallel or resources.learner_ranks"
    if len(allocation.nodes) == 1:
        gpus = allocation.nodes[0].gpus
        return (
            f"{need}{len(gpus)} are visible ({','.join(gpus)}); {lower}, share them"
            " (resources.colocate=true weights.transport=cuda_ipc), or set CUDA_VISIBLE_DEVICES="
            " to run a tiny model on the CPU"
        )
    unit = f"slots of resources.threads={resources.threads} cores"
    if any(node.gpus for node in allocation.nodes):
        unit = "GPUs"
    has = f"{allocation.free_slots} {unit} ({allocation.free_by_node})"
    return f"{need}the allocation has {has}; ask for more nodes, or {lower}"


def described(placed: Mapping[Role, Place], nodes: Sequence[Node]) -> list[str]:
    """Describe the placement in one line per node: `node1: controller, servers 0-7`."""
    lines: dict[str, list[str]] = {node.name: [] for node in nodes}
    servers: dict[str, list[int]] = {node.name: [] for node in nodes}
    for role, place in sorted(placed.items()):
        for n, node in enumerate(place.nodes):
            if role.kind == "server":
                servers[node.name].append(role.index)
                continue
            text = role.name
            if place.ranks > 1:
                first = n * place.ranks
                last = first + place.ranks - 1
                text = f"learner ranks {first}-{last}"
            lines[node.name].append(text)
    for name, indices in servers.items():
        if indices:
            lines[name].append(listed(indices))
    texts = []
    for name, roles in lines.items():
        contents = ", ".join(roles) or "nothing"
        texts.append(f"{name}: {contents}")
    return texts
