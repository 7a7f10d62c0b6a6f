"""Roles on nodes: every GPU is given once; servers and learner lie within a node or on
whole nodes.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.core.base.errors import MegarlError
from megarl.core.recipe import Recipe, from_tree, load
from megarl.run.nodes import Node
from megarl.run.placement import described, place, place_servers
from megarl.run.restart import Role


def nodes(count: int, gpus: int = 8, cores: int = 2) -> list[Node]:
    names = tuple(map(str, range(gpus)))
    return [
        Node(f"n{i + 1}", f"n{i + 1}", f"10.0.0.{i + 1}", "ib0", names, cores, 0, ())
        for i in range(count)
    ]


def recipe(servers: int, width: int, ranks: int, threads: int = 1) -> Recipe:
    resources = {
        "servers": servers,
        "server_tensor_parallel": width,
        "learner_ranks": ranks,
        "threads": threads,
    }
    return from_tree({"resources": resources, "batch": {"prompts": ranks}})


def test_scalerl_8b_on_ten_nodes() -> None:
    placed = place(load("scalerl-8b"), nodes(10))
    assert described(placed, nodes(10)) == [
        "n1: controller-0, servers 0-1",
        *(f"n{i}: servers {2 * (i - 1)}-{2 * i - 1}" for i in range(2, 8)),
        "n8: learner ranks 0-7",
        "n9: learner ranks 8-15",
        "n10: learner ranks 16-23",
    ]
    assert placed[Role("server", 9)].gpus == ("4", "5", "6", "7")
    assert placed[Role("learner")].gpus == tuple("01234567")


def test_scalerl_17bx16_has_two_servers_a_node() -> None:
    placed = place(load("scalerl-17bx16"), nodes(10))
    assert [placed[Role("server", i)].nodes[0].name for i in (0, 1, 2, 11)] == [
        "n1",
        "n1",
        "n2",
        "n6",
    ]
    assert placed[Role("server", 3)].gpus == ("4", "5", "6", "7")


def test_one_node_is_shared() -> None:
    placed = place(recipe(2, 2, 3), nodes(1))
    assert [placed[Role("server", i)].gpus for i in (0, 1)] == [("0", "1"), ("2", "3")]
    assert placed[Role("learner")].gpus == ("5", "6", "7")
    assert placed[Role("controller")].gpus == ()


def shared(servers: int, width: int) -> Recipe:
    return from_tree(
        {
            "resources": {
                "servers": servers,
                "server_tensor_parallel": width,
                "learner_ranks": servers * width,
                "colocate": True,
            },
            "batch": {"prompts": servers * width},
            "weights": {"transport": "cuda_ipc"},
            "serving": {"memory_fraction": 0.4},
        }
    )


def test_one_gpu_is_shared() -> None:
    placed = place(load("scalerl-1gpu"), nodes(1, gpus=1))
    assert placed[Role("server", 0)] == placed[Role("learner")]
    assert placed[Role("learner")].gpus == ("0",)


def test_servers_lie_on_the_learners_gpus_in_order() -> None:
    placed = place(shared(2, 2), nodes(2))
    assert placed[Role("learner")].gpus == ("4", "5", "6", "7")
    assert [placed[Role("server", i)].gpus for i in (0, 1)] == [("4", "5"), ("6", "7")]
    assert {of.nodes[0].name for of in placed.values()} == {"n2"}
    assert {of.gpus for of in place(shared(2, 2), nodes(1, gpus=0)).values()} == {()}
    with pytest.raises(MegarlError, match=r"resources.colocate: 16 learner ranks take 2 nodes"):
        place(shared(16, 1), nodes(2))
    with pytest.raises(
        MegarlError,
        match=r"resources.colocate: 16 learner ranks take 2 nodes, and only GPUs of one",
    ):
        place(shared(1, 16), nodes(2))


def test_two_gpus_too_few_are_told_how_to_share() -> None:
    with pytest.raises(
        MegarlError, match=r"need 2 GPUs, and 1 are visible \(0\).*resources.colocate=true"
    ):
        place(recipe(1, 1, 1), nodes(1, gpus=1))
    with pytest.raises(
        MegarlError, match=r"resources: 2 learner ranks need 2 GPUs, and 1 are visible"
    ):
        place(shared(2, 1), nodes(1, gpus=1))


def test_a_server_wider_than_a_node_takes_whole_nodes() -> None:
    """Also those that another server has left whole; each process sees the GPUs of its
    node.
    """
    placed = place(recipe(2, 16, 4), nodes(5))
    assert [[node.name for node in placed[Role("server", i)].nodes] for i in (0, 1)] == [
        ["n1", "n2"],
        ["n3", "n4"],
    ]
    assert placed[Role("server", 1)].gpus == tuple("01234567")
    assert described(placed, nodes(5)) == [
        "n1: controller-0, server 0",
        "n2: server 0",
        "n3: server 1",
        "n4: server 1",
        "n5: learner ranks 0-3",
    ]
    threads = place(recipe(1, 2, 1, threads=2), nodes(3, gpus=0))
    assert [node.name for node in threads[Role("server")].nodes] == ["n1", "n2"]
    assert len(place(recipe(1, 4, 1), nodes(1, gpus=0))[Role("server")].nodes) == 1, (
        "one machine without GPUs"
    )


def test_without_gpus() -> None:
    """One machine takes what it is given; several have a place for each `threads`
    cores.
    """
    assert {of.gpus for of in place(recipe(8, 1, 8), nodes(1, gpus=0)).values()} == {()}
    placed = place(recipe(2, 1, 1), nodes(2, gpus=0))
    assert described(placed, nodes(2, gpus=0)) == ["n1: controller-0, servers 0-1", "n2: learner-0"]
    placed = place(recipe(2, 1, 1, threads=2), nodes(3, gpus=0))
    assert described(placed, nodes(3)) == [
        "n1: controller-0, server 0",
        "n2: server 1",
        "n3: learner-0",
    ]


@pytest.mark.parametrize(
    ("servers", "width", "ranks", "count", "said"),
    [
        (2, 2, 5, 1, "need 9 GPUs, and 8 are visible"),
        (
            8,
            1,
            16,
            2,
            r"need 24 GPUs, and the allocation has 16 GPUs \(n1 8, n2 8\); ask for more nodes",
        ),
        (
            1,
            1,
            12,
            2,
            (
                r"learner_ranks: 12 ranks take whole nodes, and the last nodes have 8, 8 GPUs each;"
                r" use a multiple"
            ),
        ),
        (
            2,
            5,
            4,
            2,
            (
                r"server 1 of 2 finds no node with 5 free GPUs \(free: n1 3, n2 4\); .* divides a"
                r" node's"
            ),
        ),
        (
            1,
            12,
            4,
            2,
            r"server_tensor_parallel: 12 GPUs are more than the 8 of a node.* use a multiple of 8",
        ),
    ],
)
def test_what_does_not_fit(servers: int, width: int, ranks: int, count: int, said: str) -> None:
    with pytest.raises(MegarlError, match=said):
        place(recipe(servers, width, ranks), nodes(count))


def test_copies_of_the_attention_share_a_node() -> None:
    tree = {
        "resources": {"server_tensor_parallel": 16},
        "serving": {"attention_copies": 2},
    }
    with pytest.raises(MegarlError, match=r"serving.attention_copies: a server of 16 GPUs takes 2"):
        place(from_tree(tree), nodes(3))


@given(
    st.integers(1, 20),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.integers(1, 32),
    st.integers(1, 8),
    st.sampled_from([4, 8]),
)
def test_no_gpu_is_given_twice(servers: int, width: int, ranks: int, count: int, gpus: int) -> None:
    try:
        placed = place(recipe(servers, width, ranks), nodes(count, gpus))
    except MegarlError:
        return
    given_out = [(node.name, gpu) for of in placed.values() for node in of.nodes for gpu in of.gpus]
    assert len(given_out) == len(set(given_out)) == servers * width + ranks
    learner = placed[Role("learner")]
    assert len(learner.nodes) * learner.ranks == ranks
    assert len(placed) == servers + 2


def test_servers_alone() -> None:
    (node,) = nodes(1, gpus=4)
    placed = place_servers(recipe(2, 2, 1), node)
    assert [of.gpus for of in placed.values()] == [("0", "1"), ("2", "3")]
    assert {of.gpus for of in place_servers(recipe(3, 2, 1), nodes(1, gpus=0)[0]).values()} == {()}
    with pytest.raises(MegarlError, match="3 servers x 2 GPUs need 6, and 4 are visible"):
        place_servers(recipe(3, 2, 1), node)
