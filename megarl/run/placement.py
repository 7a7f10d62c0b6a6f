"""Which role runs where, and on which GPUs. Pure.

    node 1    server-0  server-1 … server-7    controller
    node 2    server-8  …                      servers from the first node on;
    …                                          then the teacher's
    node 9    learner ranks 0 … 7              the learner on the last GPUs:
    node 10   learner ranks 8 … 15             part of a node, or whole nodes

A server lies within a node. If it has more GPUs than a node, it takes whole nodes.

With resources.colocate the servers share the learner's GPUs, all on one node: server 0
has those of the first ranks.

A slot is a GPU or, if no node has one, `resources.threads` cores. A single node without
GPUs takes every role regardless.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megarl.core.base.errors import MegarlError
from megarl.core.recipe import Recipe
from megarl.core.server.membership import listed
from megarl.run.devices import needed
from megarl.run.nodes import Node
from megarl.run.restart import Role, RoleKind


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


def place(recipe: Recipe, nodes: Sequence[Node]) -> dict[Role, Place]:
    """Place servers from the front, the learner at the end, the controller on the first
    node. MegarlError if they don't fit.
    """
    resources = recipe.resources
    slots = _slots(recipe, nodes)
    free = [list(of_node) for of_node in slots]
    if sum(map(len, free)) < needed(recipe):
        raise MegarlError(_too_few(recipe, nodes, free))
    learner = _learner(resources.learner_ranks, nodes, free)
    placed = {Role("learner"): learner}
    if resources.colocate:
        placed |= _colocated(recipe, learner)
        return placed | {Role("controller"): Place((learner.nodes[0],))}
    placed |= _servers(recipe, nodes, slots, free)
    if recipe.teachers:
        placed |= _servers(recipe.teacher_recipe, nodes, slots, free, "teacher")
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
    return _servers(recipe, [node], [slots], [list(slots)])


def _servers(
    recipe: Recipe,
    nodes: Sequence[Node],
    slots: list[list[str]],
    free: list[list[str]],
    kind: RoleKind = "server",
) -> dict[Role, Place]:
    """Place servers on the first free GPUs of all `slots`, and remove these from
    `free`.
    """
    servers = recipe.resources.servers
    width = recipe.resources.server_tensor_parallel
    size = max(map(len, slots))
    key = f"resources.{kind}_tensor_parallel"
    count = max(1, width // size)
    placed = {}
    if width > size and width % size:
        raise MegarlError(
            f"{key}: {width} GPUs are more than the {size} of a node, and such a server takes whole"
            f" nodes; use a multiple of {size}"
        )
    for i in range(servers):
        candidates = _candidates(width, size, slots, free)
        if len(candidates) < count:
            places = "node" if count == 1 else f"{count} nodes"
            raise MegarlError(
                f"resources: {kind} {i} of {servers} finds no {places} with {width // count} free"
                f" GPUs (free: {_counts(nodes, free)}); it lies within a node or on whole ones:"
                f" choose {key} so that it divides a node's GPUs, or ask for more nodes"
            )
        taken_nodes = candidates[:count]
        gpus = free[taken_nodes[0]][: width // count]
        for n in taken_nodes:
            del free[n][: len(gpus)]
        placed[Role(kind, i)] = Place(tuple(nodes[n] for n in taken_nodes), _named(gpus))
    return placed


def _candidates(
    width: int, size: int, slots: Sequence[Sequence[str]], free: Sequence[Sequence[str]]
) -> list[int]:
    """Return the nodes on which a server of `width` GPUs may be placed. One of more
    than one node needs whole ones of `size` GPUs, with the same names.
    """
    if width < 2 * size:
        return [n for n, names in enumerate(free) if len(names) >= width]
    idle = [n for n, names in enumerate(free) if len(names) == size and names == slots[n]]
    return [n for n in idle if free[n] == free[idle[0]]]


def _learner(ranks: int, nodes: Sequence[Node], free: list[list[str]]) -> Place:
    """Place the learner on the last GPUs of the last node, or on whole nodes from the
    end.
    """
    width = len(free[-1])
    if ranks <= width:
        last = [free[-1].pop() for _ in range(ranks)]
        return Place((nodes[-1],), _named(last[::-1]), ranks)
    count = ranks // width if width else 0
    if not count or ranks % width or any(slots != free[-1] for slots in free[-count:]):
        raise MegarlError(
            f"resources.learner_ranks: {ranks} ranks take whole nodes, and the last nodes have"
            f" {', '.join(str(len(slots)) for slots in free)} GPUs each; use a multiple of a"
            " node's, on nodes with equally many"
        )
    gpus = _named(free[-1])
    for slots in free[-count:]:
        slots.clear()
    return Place(tuple(nodes[-count:]), gpus, width)


def _named(slots: Sequence[str]) -> tuple[str, ...]:
    return tuple(slot for slot in slots if slot)


def _too_few(recipe: Recipe, nodes: Sequence[Node], free: Sequence[Sequence[str]]) -> str:
    resources = recipe.resources
    parts = []
    if not resources.colocate:
        parts.append(f"{resources.servers} servers x {resources.server_tensor_parallel} GPUs")
    if recipe.teachers:
        parts.append(f"{recipe.teachers} teachers x {resources.teacher_tensor_parallel} GPUs")
    parts.append(f"{resources.learner_ranks} learner ranks")
    need = f"resources: {' + '.join(parts)} need {needed(recipe)} GPUs, and "
    lower = "lower resources.servers, resources.server_tensor_parallel or resources.learner_ranks"
    if len(nodes) == 1:
        visible = ",".join(nodes[0].gpus)
        return (
            f"{need}{len(nodes[0].gpus)} are visible ({visible}); {lower}, share them"
            " (resources.colocate=true weights.transport=cuda_ipc), or set CUDA_VISIBLE_DEVICES="
            " to run a tiny model on the CPU"
        )
    unit = f"slots of resources.threads={resources.threads} cores"
    if any(node.gpus for node in nodes):
        unit = "GPUs"
    has = f"{sum(map(len, free))} {unit} ({_counts(nodes, free)})"
    return f"{need}the allocation has {has}; ask for more nodes, or {lower}"


def _counts(nodes: Sequence[Node], free: Sequence[Sequence[str]]) -> str:
    return ", ".join(f"{node.name} {len(slots)}" for node, slots in zip(nodes, free, strict=True))


def described(placed: Mapping[Role, Place], nodes: Sequence[Node]) -> list[str]:
    """Describe the placement in one line per node: `node1: controller, servers 0-7`."""
    lines: dict[str, list[str]] = {node.name: [] for node in nodes}
    servers: dict[str, list[int]] = {node.name: [] for node in nodes}
    for role, place in sorted(placed.items()):
        for n, node in enumerate(place.nodes):
            if role.kind == "server":
                servers[node.name].append(role.index)
            elif place.ranks == 1:
                lines[node.name].append(role.name)
            else:
                first = n * place.ranks
                last = first + place.ranks - 1
                lines[node.name].append(f"learner ranks {first}-{last}")
    for name, indices in servers.items():
        if indices:
            lines[name].append(listed(indices))
    return [f"{name}: {', '.join(roles) or 'nothing'}" for name, roles in lines.items()]
