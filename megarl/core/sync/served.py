"""How an SGLang server stores Hugging Face tensors: joined along rows, a layer's
experts in one parameter, some reordered.

q_proj, k_proj, v_proj                       ►  qkv_proj
gate_proj, up_proj                           ►  gate_up_proj
experts.0.gate_proj, experts.0.up_proj, …1…  ►  experts.w13_weight
q_a_proj, kv_a_proj_with_mqa                 ►  fused_qkv_a_proj_with_mqa
embed_tokens, lm_head                        ►  the same, with zero rows up to a
                                                multiple of 64

Llama 4 has the rows of q and k in rotary order; gpt-oss has gate_up_proj for each
expert, and w13_weight_bias; q_a_proj is in DeepSeek-V3 with compressed q. MiniMax-M2's
w1, w3, w2 are gate, up and down. Qwen3.5 has in delta networks, and in attention under
names without `self_attn`:

in_proj_qkv, in_proj_z                       ►  in_proj_qkvz
in_proj_b, in_proj_a                         ►  in_proj_ba
q_proj with q's gates, k_proj, v_proj        ►  qkv_proj

In FP8 (sync/block_fp8.py) the scales of these weights are joined in the same way:
qkv_proj.weight_scale_inv, …
"""

import re
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.core.base.architecture import Architecture
from megarl.core.client.servable import INNER_MULTIPLE
from megarl.core.sync.block_fp8 import BLOCK

VOCABULARY_MULTIPLE = 64
PADDED = ("embed_tokens.weight", "lm_head.weight")

SCALES = "weight_scale_inv"

_ATTENTION = re.compile(r"\.(q|k|v)_proj\.(weight|bias|weight_scale_inv)$")
_DELTA = re.compile(r"\.in_proj_(qkv|z|b|a)\.weight$")
_LATENT = re.compile(r"\.(q_a_proj|kv_a_proj_with_mqa)\.weight$")
_EXPERT = re.compile(
    r"\.experts\.(\d+)\.(gate_proj|up_proj|gate_up_proj|down_proj|w1|w2|w3)"
    r"\.(weight|bias|weight_scale_inv)$"
)
_GATED = re.compile(r"\.(gate|up)_proj\.(weight|weight_scale_inv)$")
_ENDINGS = {"weight": "", "bias": "_bias", SCALES: "_scale_inv"}
"""How the server's name of stacked experts ends, after `weight`, by the ending of the
Hugging Face name.
"""


class ServedPart(NamedTuple):
    """The part of the server's parameter `name`, from byte `start` on, that holds one
    Hugging Face tensor.
    """

    name: str
    start: int = 0


def place(name: str, tensor: Tensor, model: Architecture) -> ServedPart:
    """Return where the server stores this Hugging Face tensor."""
    if model.delta:
        name = name.replace("model.language_model.", "model.").replace(".self_attn.", ".")
        if match := _DELTA.search(name):
            first_row = {"qkv": 0, "z": model.delta.convolved, "b": 0, "a": model.delta.value_heads}
            joint = "qkvz" if match[1] in ("qkv", "z") else "ba"
            start = first_row[match[1]] * tensor[0].nbytes
            return ServedPart(_DELTA.sub(f".in_proj_{joint}.weight", name), start)
    if model.latent:
        match = _LATENT.search(name)
        if match and model.latent.query is not None:
            rows = 0 if match[1] == "q_a_proj" else model.latent.query
            fused_name = _LATENT.sub(".fused_qkv_a_proj_with_mqa.weight", name)
            return ServedPart(fused_name, rows * tensor[0].nbytes)
    elif match := _ATTENTION.search(name):
        query = 2 * model.query if model.gated_attention else model.query
        first_row = {"q": 0, "k": query, "v": query + model.key}
        rows = first_row[match[1]]
        if match[2] == SCALES:
            rows //= BLOCK
        return ServedPart(_ATTENTION.sub(r".qkv_proj.\2", name), rows * tensor[0].nbytes)
    if match := _EXPERT.search(name):
        return _place_in_stack(name, tensor, match)
    if match := _GATED.search(name):
        start = tensor.nbytes if match[1] == "up" else 0
        return ServedPart(_GATED.sub(r".gate_up_proj.\2", name), start)
    return ServedPart(name)


def _place_in_stack(name: str, tensor: Tensor, match: re.Match[str]) -> ServedPart:
    """Return where an expert's tensor is in its layer's stack. match: of _EXPERT."""
    preceding = int(match[1])  # tensors of this size, from earlier experts and this one
    ending = _ENDINGS[match[3]]
    stack = "w13_weight"
    if match[2] in ("down_proj", "w2"):
        stack = "w2_weight"
    elif match[2] in ("gate_proj", "w1"):
        preceding *= 2
    elif match[2] in ("up_proj", "w3"):
        preceding = 2 * preceding + 1
    return ServedPart(_EXPERT.sub(f".experts.{stack}{ending}", name), preceding * tensor.nbytes)


class RankParameter(NamedTuple):
    """A parameter of one of a server's ranks."""

    rank: int
    name: str


class ExpertPart(NamedTuple):
    """The part of a rank's parameter, from byte `start` on, that holds one expert's
    tensor.
    """

    parameter: RankParameter
    start: int


def place_expert(name: str, tensor: Tensor, model: Architecture, ranks: int) -> ExpertPart | None:
    """Return where a server whose `ranks` ranks have whole experts, each its share of
    them in order, stores this Hugging Face tensor; None if it is not an expert's.
    """
    match = _EXPERT.search(name)
    if match is None:
        return None
    rank, number = divmod(int(match[1]), model.experts // ranks)
    name_on_rank = f"{name[: match.start(1)]}{number}{name[match.end(1) :]}"
    part = place(name_on_rank, tensor, model)
    return ExpertPart(RankParameter(rank, part.name), part.start)


def as_held(name: str, tensor: Tensor, model: Architecture) -> Tensor:
    """Return the tensor with its rows as the server stores them: in rotary order, or
    padded with zeros.
    """
    is_reordered = model.rope_interleaved and not model.latent
    if is_reordered and name.endswith((".q_proj.weight", ".k_proj.weight")):
        return rotary_order(tensor, model.head_dim)
    if name.endswith(PADDED):
        missing_rows = -len(tensor) % VOCABULARY_MULTIPLE
        if missing_rows:
            return torch.cat([tensor, tensor.new_zeros(missing_rows, *tensor.shape[1:])])
    return tensor


def is_padded_inside(name: str, tensor: Tensor, ranks: int = 1) -> bool:
    """Return whether a server of `ranks` ranks, if it is on a CPU, pads this tensor
    [.., rows, columns] of an MLP.
    """
    multiple = INNER_MULTIPLE * ranks
    if name.endswith(("down_proj.weight", ".w2.weight")):
        return tensor.shape[-1] % multiple != 0
    if name.endswith(("gate_proj.weight", "up_proj.weight", ".w1.weight", ".w3.weight")):
        return tensor.shape[-2] % multiple != 0
    return False


def rotary_order(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows of q_proj or k_proj [heads * head_dim, hidden]: in each head the
    first of all pairs, then the second.
    """
    hidden = weight.shape[-1]
    return weight.view(-1, head_dim // 2, 2, hidden).transpose(1, 2).reshape(-1, hidden)
