"""What `learner.recompute` and `model.moe.shared_overlap` ask of megatron, and for
which models they are refused.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.core.base.architecture import in_directory
from megarl.core.base.errors import MegarlError
from megarl.core.learner.moe import routes_again
from megarl.core.models import build
from megarl.core.recipe import Model, Moe
from megarl.core.recipe.rules import impossible_for
from tests.tiny import tiny_llama, tiny_llama4, tiny_qwen3_moe

OVERLAPPED = {"expert_parallel": 2, "moe": Moe(shared_overlap=True)}


def test_light_is_norms_and_activation_functions_of_grouped_experts() -> None:
    """Experts one by one, as on a CPU, keep what their activation functions return:
    megatron refuses moe_act.
    """
    assert build.recomputed("light", grouped_experts=True)["recompute_modules"] == [
        "layernorm",
        "moe_act",
    ]
    assert build.recomputed("light", grouped_experts=False)["recompute_modules"] == ["layernorm"]


@pytest.mark.parametrize(
    ("recompute", "again"), [("none", False), ("light", False), ("selective", True), ("full", True)]
)
def test_routers_run_again_only_with_their_whole_block(
    tmp_path: Path, recompute: str, again: bool
) -> None:
    tiny_qwen3_moe(tmp_path)
    config = build.transformer_config(
        Model(path=str(tmp_path)), in_directory(tmp_path), False, recompute
    )
    assert routes_again(config) == again


def test_a_dense_model_has_nothing_light_to_recompute(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    sizes = in_directory(tmp_path).megatron_sizes()
    assert not list(impossible_for(Model(path="M"), sizes, "selective"))
    with pytest.raises(
        MegarlError, match=r"learner\.recompute: light is for experts, and .* has none"
    ):
        build.transformer_config(Model(path=str(tmp_path)), in_directory(tmp_path), False, "light")


@pytest.mark.parametrize(("tiny", "shared"), [(tiny_llama4, True), (tiny_qwen3_moe, False)])
def test_only_shared_experts_can_overlap(
    tmp_path: Path, tiny: Callable[[Path], None], shared: bool
) -> None:
    tiny(tmp_path)
    model = Model.model_validate({"path": str(tmp_path)} | OVERLAPPED)
    if shared:
        config = build.transformer_config(model, in_directory(tmp_path), False)
        assert config.moe_shared_expert_overlap
        return
    with pytest.raises(MegarlError, match=r"model\.moe\.shared_overlap: .* has no shared experts"):
        build.transformer_config(model, in_directory(tmp_path), False)
