"""FP8 and MXFP4 directories become the bf16 ones that an independent reading of both
formats says, or one message.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from checkpoints_tools import partial, quantized
from checkpoints_tools.__main__ import main
from megarl.core.base.architecture import in_directory
from megarl.core.base.errors import MegarlError
from megarl.core.base.model_directory import open_model
from megarl.core.models import family_of
from tests.tiny import tiny_gpt_oss

# isort: split
from safetensors.torch import load_file, save_file

E4M3 = torch.float8_e4m3fn
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
SHAPES = [(300, 200), (128, 256), (1, 129), (130, 5)]
"""The FP8 matrices: blocks at the edges are cut."""


def written(directory: Path, quantization: object, tensors: dict[str, Tensor]) -> Path:
    directory.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "quantization_config": quantization,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")
    save_file(tensors, directory / "model.safetensors")
    return directory


def fp8_tensors(scale_type: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Every code but the two NaNs, scales of many sizes,
    and tensors that are not FP8.
    """
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "norm": torch.randn(7, dtype=torch.bfloat16, generator=generator),
        "gate.bias": torch.randn(8),
    }
    for i, (rows, columns) in enumerate(SHAPES):
        codes = torch.randint(0, 254, (rows, columns), generator=generator, dtype=torch.uint8)
        codes += codes >= 127  # not 127, nor 255
        scales = torch.exp2(
            12 * torch.randn(-(-rows // 128), -(-columns // 128), generator=generator)
        )
        tensors[f"{i}.weight"], tensors[f"{i}.weight_scale_inv"] = (
            codes.view(E4M3),
            scales.to(scale_type),
        )
    return tensors


def mxfp4_tensors() -> dict[str, Tensor]:
    """Every byte; every scale but those beyond bf16's range."""
    generator = torch.Generator().manual_seed(0)
    tensors = {"norm": torch.randn(7, dtype=torch.bfloat16, generator=generator)}
    for name, (experts, rows, groups) in {
        "a.down_proj": (3, 40, 2),
        "a.gate_up_proj": (3, 33, 3),
    }.items():
        tensors[f"{name}_blocks"] = torch.randint(
            0, 256, (experts, rows, groups, 16), generator=generator, dtype=torch.uint8
        )
        tensors[f"{name}_scales"] = torch.randint(
            0, 252, (experts, rows, groups), generator=generator, dtype=torch.uint8
        )
    return tensors


def e4m3(code: int) -> float:
    """Four bits of exponent biased by 7, three of mantissa; subnormal where the
    exponent is 0 (arXiv 2209.05433).
    """
    exponent = code >> 3 & 15
    mantissa = code & 7
    size = math.ldexp(8 + mantissa, exponent - 10) if exponent else math.ldexp(mantissa, -9)
    return -size if code & 128 else size


def same_bits(a: Tensor, b: Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(
        a.view(torch.uint8), b.view(torch.uint8)
    )


@pytest.mark.parametrize("scale_type", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_fp8_is_each_code_times_the_scale_of_its_block(
    tmp_path: Path, scale_type: torch.dtype
) -> None:
    tensors = fp8_tensors(scale_type)
    source = written(tmp_path / "fp8", FP8, tensors)
    assert main(["dequantize", str(source), str(tmp_path / "bf16")]) == 0
    found = load_file(tmp_path / "bf16" / "model.safetensors")
    assert found.keys() == {name for name in tensors if not name.endswith("_inv")}
    assert all(same_bits(found[name], tensors[name]) for name in ("norm", "gate.bias"))
    for i, (rows, columns) in enumerate(SHAPES):
        codes = tensors[f"{i}.weight"].view(torch.uint8).tolist()
        scales = tensors[f"{i}.weight_scale_inv"].float().tolist()
        # A product of two float32 numbers is exact in Python's doubles; it is rounded
        # to float32, then to bf16.
        values = [
            [e4m3(codes[r][c]) * scales[r // 128][c // 128] for c in range(columns)]
            for r in range(rows)
        ]
        assert same_bits(
            found[f"{i}.weight"], torch.tensor(values, dtype=torch.float64).float().bfloat16()
        )
    config = json.loads((tmp_path / "bf16" / "config.json").read_text())
    assert config == {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
    assert (tmp_path / "bf16" / "tokenizer.json").read_text() == "{}"


def test_mxfp4_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    tensors = mxfp4_tensors()
    source = written(tmp_path / "mxfp4", MXFP4, tensors)
    assert main(["dequantize", str(source), str(tmp_path / "bf16")]) == 0
    found = load_file(tmp_path / "bf16" / "model.safetensors")
    assert found.keys() == {"norm", "a.down_proj", "a.gate_up_proj"}
    assert same_bits(found["norm"], tensors["norm"])
    for name in ("a.down_proj", "a.gate_up_proj"):
        blocks = tensors[f"{name}_blocks"]
        scales = tensors[f"{name}_scales"]
        assert len(blocks.unique()) == 256
        assert same_bits(found[name], convert_moe_packed_tensors(blocks, scales))


def test_a_gpt_oss_as_released_becomes_one_that_the_learner_reads(tmp_path: Path) -> None:
    """Experts in MXFP4 and the rest in bf16, under the names that transformers has
    after it has dequantised them itself.
    """
    tiny_gpt_oss(
        tmp_path / "plain",
        torch.bfloat16,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=1,
    )
    tensors = load_file(tmp_path / "plain/model.safetensors")
    expected = {}
    draw = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        blocks = torch.randint(
            0, 256, (experts, rows, columns // 32, 16), generator=draw, dtype=torch.uint8
        )
        scales = torch.randint(
            118, 124, (experts, rows, columns // 32), generator=draw, dtype=torch.uint8
        )
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks, scales)
    source = written(tmp_path / "mxfp4", MXFP4, tensors)
    config = json.loads((tmp_path / "plain/config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": MXFP4}))
    with pytest.raises(MegarlError, match="python -m checkpoints_tools dequantize"):
        family_of(source)
    assert main(["dequantize", str(source), str(tmp_path / "bf16")]) == 0
    open_model(tmp_path / "bf16")
    found = load_file(tmp_path / "bf16/model.safetensors")
    assert len(expected) == 2
    assert all(same_bits(found[name], expected[name]) for name in expected)


def test_a_killed_conversion_goes_on_file_by_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = written(tmp_path / "fp8", FP8, fp8_tensors())
    quantized.dequantize(source, tmp_path / "at once")
    whole = load_file(tmp_path / "at once" / "model.safetensors")
    finish = partial.Partial.finish

    def dies(self: partial.Partial, name: str, note: object) -> None:
        finish(self, name, note)
        if name.startswith("model-00002"):
            self.flush()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(partial.Partial, "finish", dies)
        with pytest.raises(KeyboardInterrupt):
            quantized.dequantize(source, tmp_path / "bf16", file_bytes=1)
    left = sorted(path.name for path in (tmp_path / ".bf16.partial").glob("*.safetensors"))
    assert left == ["model-00001-of-00006.safetensors", "model-00002-of-00006.safetensors"]
    times = [(tmp_path / ".bf16.partial" / name).stat().st_mtime_ns for name in left]
    quantized.dequantize(source, tmp_path / "bf16", file_bytes=1)
    assert [(tmp_path / "bf16" / name).stat().st_mtime_ns for name in left] == times
    index = json.loads((tmp_path / "bf16" / "model.safetensors.index.json").read_text())[
        "weight_map"
    ]
    assert index.keys() == whole.keys()
    assert all(
        same_bits(load_file(tmp_path / "bf16" / index[name])[name], whole[name]) for name in whole
    )


def without(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: value for key, value in tensors.items() if key != name}


NAN = torch.full((40, 2), 255, dtype=torch.uint8).expand(3, 40, 2).contiguous()
BAD: dict[str, tuple[Any, dict[str, Tensor], str]] = {
    "not quantised": (None, {"a": torch.ones(2)}, "not quantised"),
    "another method": (
        {"quant_method": "awq"},
        {"a": torch.ones(2)},
        "only fp8 and mxfp4 can be converted",
    ),
    "a scale per tensor": (
        {"quant_method": "fp8"},
        fp8_tensors(),
        "weight_block_size None in config.json",
    ),
    "blocks of another size": (
        FP8 | {"weight_block_size": [64, 64]},
        fp8_tensors(),
        r"0.weight is float8_e4m3fn \[300, 200\] with",
    ),
    "scales missing": (
        FP8,
        without(fp8_tensors(), "1.weight_scale_inv"),
        "1.weight_scale_inv is missing",
    ),
    "numbers missing": (
        FP8,
        without(fp8_tensors(), "1.weight"),
        "1.weight_scale_inv has no counterpart",
    ),
    "groups missing": (
        MXFP4,
        without(mxfp4_tensors(), "a.down_proj_blocks"),
        "a.down_proj_scales has no counterpart",
    ),
    "not of this method": (MXFP4, fp8_tensors(), "no tensor is mxfp4"),
    "E4M3's NaN": (
        FP8,
        fp8_tensors() | {"0.weight": torch.full((300, 200), torch.nan).to(E4M3)},
        "0.weight is not finite",
    ),
    "E8M0's NaN": (
        MXFP4,
        mxfp4_tensors() | {"a.down_proj_scales": NAN},
        "a.down_proj is not finite",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_message_and_leaves_nothing(
    tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    quantization, tensors, message = BAD[case]
    source = written(tmp_path / "source", quantization, tensors)
    assert main(["dequantize", str(source), str(tmp_path / "bf16")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    with pytest.raises(MegarlError, match=message):
        raise MegarlError(line)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_quantised_directory_is_refused_by_name_and_the_message_says_the_command(
    tmp_path: Path,
) -> None:
    source = written(tmp_path / "mxfp4", MXFP4, mxfp4_tensors())
    with pytest.raises(
        MegarlError,
        match=rf"quant_method mxfp4.*python -m checkpoints_tools dequantize {source} NEW",
    ):
        in_directory(source)
