"""A real SGLang server with FP8 parameters, whose products a stand-in computes on the
CPU (tests/fp8_stand_in.py).
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megarl.core.base.messages import Publish, Published
from megarl.core.models import build, family_of, hf, parallel
from megarl.core.sync import delta, process_group
from megarl.core.sync import sent_deltas as deltas
from megarl.core.sync.block_fp8 import is_quantised, quantise, quantised
from megarl.core.sync.publisher import Publisher
from megarl.core.sync.transport import SentChecksums, buckets
from tests import fp8_stand_in
from tests.processes import SERVERS, Forked
from tests.stack.conftest import POSITIONS, Stack, assert_arrived, running, two_models
from tests.stack.publish_world import nudge
from tests.tiny import tiny_qwen3, tiny_qwen3_moe

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

PROMPT = np.arange(5, 45, dtype=np.int32)
SHAPE: dict[str, Any] = {
    "dtype": torch.bfloat16,
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "head_dim": 32,
    "intermediate_size": 384,
    "max_position_embeddings": POSITIONS,
    "eos_token_id": None,
}
EXPERTS = SHAPE | {"moe_intermediate_size": 128}
MAKE = {"dense": (tiny_qwen3, SHAPE), "experts": (tiny_qwen3_moe, EXPERTS)}


@pytest.fixture(scope="module", params=["dense", pytest.param("experts", marks=pytest.mark.slow)])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    """A server that began with the bf16 directory of model `a`."""
    directory = tmp_path_factory.mktemp("fp8")
    make, shape = MAKE[request.param]
    model = {"path": str(directory / "a"), "dtype": "bf16"}
    serving = {"kv_tokens": 16384, "max_running_requests": 32, "quantization": "fp8"}

    def stand_in(arguments: Sequence[str], *how: Any) -> Forked:
        return SERVERS.start(fp8_stand_in.serve, [arguments], *how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SERVERS, "megarl", stand_in)
        with running(
            directory, two_models(directory, make, **shape), model=model, serving=serving
        ) as stack:
            yield stack


@pytest.fixture(scope="module")
def chunks_of(served: Stack) -> Iterator[Any]:
    """chunks_of("b"): the learner's chunks with that model's weights,
    and their family.
    """
    parallel.start(served.recipe.model, seed=0, timeout_s=60)
    family = family_of(served.directory / "a")
    chunks = build.build(served.recipe.model, served.directory / "a")

    def with_weights(name: str) -> Any:
        hf.load(chunks, family, served.directory / name)
        return chunks, family

    yield with_weights
    parallel.stop()


class Publications:
    def __init__(self, served: Stack, chunks_of: Any, **weights: Any) -> None:
        recipe = served.recipe
        changed = recipe.weights.model_copy(update=weights)
        self.chunks, self.family = chunks_of("a")
        self._served = served
        self._publisher = Publisher(
            recipe.model_copy(update={"weights": changed}),
            served.endpoints,
            self.chunks,
            self.family,
        )

    def publish(self, version: int) -> Published:
        published = self._publisher.publish(
            Publish(version, (self._served.server.address,)), "test"
        )
        assert published is not None
        return published


def tensors_of(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "model.safetensors")


def expected(served: Stack, name: str) -> dict[str, str]:
    """The checksums of what a learner with this model's weights would send."""
    sums = SentChecksums(family_of(served.directory / "a").architecture)
    for _ in sums.watch(quantised(tensors_of(served.directory / name).items())):
        pass
    return sums.expected()


def logprobs(model: Any, sequence: np.ndarray) -> np.ndarray:
    """transformers' log-probs of each token but the first, with the head in FP32."""
    tokens = torch.from_numpy(sequence.astype(np.int64))
    with torch.no_grad():
        hidden = model.model(tokens[None]).last_hidden_state[0, :-1]
        logits = hidden.float() @ model.lm_head.weight.float().T
        return torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0].numpy()


@contextmanager
def products_of_the_stand_in(model: Any) -> Iterator[None]:
    """transformers' linear maps multiply like those of the server, with the weights
    that it should have.
    """
    handles = []
    for name, module in model.named_modules():
        if not is_quantised(f"{name}.weight"):
            continue
        values, scales = quantise(module.weight.detach())

        def replaced(
            module: Any, inputs: Any, out: Any, values: Any = values, scales: Any = scales
        ) -> Tensor:
            return fp8_stand_in.product(inputs[0], values, scales)

        handles.append(module.register_forward_hook(replaced))
    assert handles
    yield
    for handle in handles:
        handle.remove()


def test_a_server_quantises_the_bf16_directory_that_it_begins_with(served: Stack) -> None:
    _, (held,) = served.ask(lambda client: client.checksums())
    assert held is not None
    wanted = expected(served, "a")
    assert wanted.items() <= held.items()
    scales = [name for name in wanted if name.endswith("_scale_inv")]
    assert len(scales) == 2 * 4


def test_it_generates_by_the_quantised_model(served: Stack) -> None:
    if hasattr(served.models["a"].config, "num_experts"):
        pytest.skip(
            "transformers keeps a layer's experts in one tensor, so they cannot be replaced one"
            " by one"
        )
    served.ask(lambda client: client.load(str(served.directory / "a"), 0))
    generation = served.ask(lambda client: client.generate(PROMPT, 300))
    sequence = np.concatenate([PROMPT, generation.tokens])
    model = served.models["a"]
    first = len(PROMPT) - 1
    with products_of_the_stand_in(model):
        off = np.abs(generation.logprobs - logprobs(model, sequence)[first:]).mean()
    off_from_bf16 = np.abs(generation.logprobs - logprobs(model, sequence)[first:]).mean()
    assert off < 0.75 * off_from_bf16, (off, off_from_bf16)


@pytest.mark.parametrize("transport", ["process_group", "disk"])
def test_publications_by_each_transport_bring_the_bytes_that_a_directory_does(
    served: Stack, chunks_of: Any, transport: str
) -> None:
    by = Publications(served, chunks_of, transport=transport)
    first = assert_arrived(by.publish(10))
    _, (held,) = served.ask(lambda client: client.checksums())
    assert expected(served, "a").items() <= (held or {}).items()
    chunks_of("b")
    published = by.publish(11)
    second = assert_arrived(published)
    assert second != first
    _, (held,) = served.ask(lambda client: client.checksums())
    assert expected(served, "b").items() <= (held or {}).items()
    sent = sum(tensor.nbytes for _, tensor in quantised(tensors_of(served.directory / "b").items()))
    whole = sum(tensor.nbytes for tensor in tensors_of(served.directory / "b").values())
    assert sent < 0.7 * whole
    if transport == "process_group":
        assert published.bytes_sent == sent
    generation = served.ask(lambda client: client.generate(PROMPT, 5, cache_salt=transport))
    assert generation.spans[0].version == 11
    chunks_of("a")
    assert assert_arrived(by.publish(12)) == first


def test_deltas_add_up_and_a_damaged_one_is_noticed(
    served: Stack, chunks_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    by = Publications(served, chunks_of, full_every=100)
    whole = by.publish(20).bytes_sent
    for version in (21, 22):
        nudge(by.chunks, version)
        published = by.publish(version)
        assert assert_arrived(published)
        assert published.bytes_sent < 0.5 * whole
    nudge(by.chunks, 23)
    monkeypatch.setattr(deltas, "encode", lambda old, new: delta.encode(new, new))
    (result,) = by.publish(23).results
    assert "checksum: " in result.error
    monkeypatch.undo()
    found = by.publish(24)
    assert (found.bytes_sent, assert_arrived(found) != "") == (whole, True)


def test_a_scale_that_did_not_arrive_is_noticed(
    served: Stack, chunks_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weight's values did: the product would be wrong by a factor of two."""
    by = Publications(served, chunks_of)
    assert_arrived(by.publish(30))
    lost = "layers.1.self_attn.o_proj.weight_scale_inv"

    def one_doubled(tensors: Iterable[tuple[str, Tensor]], *sizes: Any) -> Iterator[Any]:
        return buckets(
            ((name, 2 * tensor if name.endswith(lost) else tensor) for name, tensor in tensors),
            *sizes,
        )

    monkeypatch.setattr(process_group, "buckets", one_doubled)
    (result,) = by.publish(31).results
    assert "checksum: 1 differ" in result.error
    assert lost in result.error
    assert served.ask(lambda client: client.served_version()) == 30
