"""A model split over processes computes what transformers computes, and is exported bit
for bit.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel.worlds import run_world
from tests.tiny import (
    MOONLIGHT,
    PLAIN_ROPE,
    gradients,
    tiny_deepseek_v3,
    tiny_glm4_moe,
    tiny_glm4_moe_lite,
    tiny_gpt_oss,
    tiny_llama,
    tiny_llama4,
    tiny_minimax_m2,
    tiny_qwen2,
    tiny_qwen3,
    tiny_qwen3_5,
    tiny_qwen3_5_moe,
    tiny_qwen3_5_moe_multimodal,
    tiny_qwen3_5_multimodal,
    tiny_qwen3_moe,
    tiny_qwen3_next,
)

MODELS: dict[str, Callable[..., Any]] = {
    "llama": tiny_llama,
    "qwen2": partial(tiny_qwen2, num_hidden_layers=3),  # which no pipeline divides
    # A vocabulary that no TP divides, a tied head, norms that each TP rank applies to
    # its own heads.
    "qwen3": partial(tiny_qwen3, vocab_size=131, tie_word_embeddings=True),
    "qwen3_moe": partial(tiny_qwen3_moe, vocab_size=131, mlp_only_layers=[1]),
    "llama4": tiny_llama4,
    "glm4_moe": tiny_glm4_moe,
    "glm4_moe_lite": tiny_glm4_moe_lite,
    "deepseek_v3": partial(tiny_deepseek_v3, vocab_size=131, num_hidden_layers=5),
    "moonlight": partial(tiny_deepseek_v3, rope_parameters=PLAIN_ROPE, **MOONLIGHT),
    "minimax_m2": partial(tiny_minimax_m2, vocab_size=131),
    "gpt_oss": partial(tiny_gpt_oss, vocab_size=131),
    "qwen3_5": partial(tiny_qwen3_5, linear_num_key_heads=4, linear_num_value_heads=8),
    "qwen3_5_moe": partial(tiny_qwen3_5_moe, vocab_size=131),
    "qwen3_5_released": partial(tiny_qwen3_5_moe_multimodal, vocab_size=131),
    "qwen3_5_multimodal": partial(
        tiny_qwen3_5_multimodal, linear_num_key_heads=4, linear_num_value_heads=8
    ),
    "qwen3_next": tiny_qwen3_next,
}
PACKED = [[8, 48, 16, 4, 20], [32, 12]]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DIR/models: each model's directory, and beside it NAME.pt with transformers'
    logits and gradients.
    """
    directory = tmp_path_factory.mktemp("models") / "models"
    for name, tiny in MODELS.items():
        model = tiny(directory / name)
        vocabulary = model.config.get_text_config().vocab_size
        generator = torch.Generator().manual_seed(3)
        reference = {}
        for case in ("packed", "unpacked"):
            micros = []
            logits = []
            for lengths in PACKED if case == "packed" else [[48, 48], [24, 24]]:
                sequences = [
                    torch.randint(0, vocabulary, (n,), generator=generator) for n in lengths
                ]
                weights = torch.randn(sum(lengths), vocabulary, generator=generator)
                outputs = torch.cat([model(s[None]).logits[0] for s in sequences])
                (outputs * weights).sum().backward()
                if case == "packed":
                    cu = torch.tensor([0, *lengths]).cumsum(0).int()
                    micros.append((torch.cat(sequences)[None], cu, weights[None]))
                else:
                    micros.append(
                        (torch.stack(sequences), None, weights.view(len(lengths), -1, vocabulary))
                    )
                logits.append(outputs.detach())
            of_disk = gradients(model, directory.parent / "gradients" / name / case)
            reference[case] = {"micros": micros, "logits": logits, "gradients": of_disk}
            model.zero_grad()
        torch.save(reference, directory / f"{name}.pt")
    return directory


SLOW = (
    "glm4_moe",
    "glm4_moe_lite",
    "moonlight",
    "qwen3_5_moe",
    "qwen3_5_multimodal",
    "qwen3_next",
)
"""What these have, deepseek_v3, qwen3_5_released or another has, too."""
QUICK = [name for name in MODELS if name not in SLOW]


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        pytest.param(2, [*MODELS], marks=pytest.mark.slow, id="2"),
        pytest.param(4, [*SLOW], marks=pytest.mark.slow, id="4, the rest"),
        pytest.param(4, QUICK, id="4"),
    ],
)
@pytest.mark.timeout(900)
def test_layouts_compute_what_transformers_computes(
    references: Path, ranks: int, names: list[str]
) -> None:
    print(run_world(ranks, "tests.parallel.models_world", str(references), *names, timeout_s=800))
