"""`model`: the policy, its precision and layout."""

from collections.abc import Iterator
from typing import Literal, override

from pydantic import Field

from megarl.core.recipe.section import Section

FP8_MULTIPLE = 16
"""Every dimension of an FP8 product must be a multiple of this."""
FP8_BLOCK = 128
"""Tokens of a block with one scale (model.fp8=blockwise); rows, and columns, of a block
of a server's weights (serving.quantization). If tensor-parallel ranks do not have whole
blocks, Transformer Engine gathers their FP8 numbers in bf16, without overlap, and
rounds them a second time (_start_all_gather_fp8_blockwise).
"""


class Moe(Section):
    """How experts are trained. Fixed, because other choices harm RL: no token is
    dropped, and routing is in float32.
    """

    aux_loss: float = Field(
        0.0, ge=0, description="coefficient of the Switch Transformer's balancing loss; 0: none"
    )
    bias_update_rate: float = Field(
        0.0,
        ge=0,
        description=(
            "how far a step moves routers' biases towards an even load (DeepSeek-V3: 1e-3); 0:"
            " fixed"
        ),
    )
    freeze_router: bool = Field(False, description="true: routers keep the weights they came with")
    routing_replay: bool = Field(
        False, description="the learner takes the experts that the server chose"
    )
    shared_overlap: bool = Field(
        False,
        description=(
            "shared experts compute while tokens go to other ranks' experts and back; not"
            " measured yet"
        ),
    )

    @override
    def problems(self) -> Iterator[str]:
        if self.freeze_router and self.aux_loss:
            yield (
                "aux_loss: balances by training the router, which freeze_router forbids; unset one"
                " of them"
            )


class Model(Section):
    """The policy: its weights, its precision, and how ranks divide it."""

    path: str = Field("", description="Hugging Face directory that both sides start from")
    dtype: Literal["bf16", "fp16", "fp32"] = Field(
        "bf16",
        description="weights and activations on both sides; fp16: the learner scales its losses",
    )
    fp32_head: Literal["both", "learner", "server", "none"] = Field(
        "both",
        description="which side computes the LM head in FP32; with dtype fp32 both always do",
    )
    fp8: Literal["none", "blockwise", "tensorwise"] = Field(
        "none",
        description=(
            "scales of the learner's FP8 products, by Transformer Engine; weights and servers stay"
            " bf16"
        ),
    )
    tensor_parallel: int = Field(
        1,
        ge=1,
        description=(
            "TP: ranks that divide each matrix, and the tokens between matrices (sequence"
            " parallelism)"
        ),
    )
    pipeline_parallel: int = Field(1, ge=1, description="PP: ranks that divide the layers")
    virtual_pipeline_parallel: int = Field(1, ge=1, description="model chunks per pipeline rank")
    context_parallel: int = Field(1, ge=1, description="CP: ranks that divide each sequence")
    expert_parallel: int = Field(1, ge=1, description="EP: ranks that divide the experts")
    expert_tensor_parallel: int = Field(1, ge=1, description="ETP: ranks that divide each expert")
    moe: Moe = Moe()

    @property
    def token_multiple(self) -> int:
        """A rank's layers process a multiple of this many tokens at once."""
        if self.fp8 == "none":
            return 1
        if self.fp8 == "blockwise" and self.tensor_parallel > 1:
            return FP8_BLOCK
        return FP8_MULTIPLE

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    def stage_layers(self, layers: int) -> tuple[int, int]:
        """Return how many layers a pipeline stage has, and how many the last one:
        fewer, unless the stages divide them.
        """
        per_stage = -(-layers // self.pipeline_parallel)
        return per_stage, layers - per_stage * (self.pipeline_parallel - 1)

    @override
    def problems(self) -> Iterator[str]:
        if self.moe.shared_overlap and self.expert_parallel * self.expert_tensor_parallel == 1:
            yield (
                "moe.shared_overlap: hides the exchange of tokens between ranks, and with"
                " model.expert_parallel of 1 there is none; set it to false"
            )
        if self.virtual_pipeline_parallel > 1 and self.pipeline_parallel == 1:
            yield "virtual_pipeline_parallel: needs model.pipeline_parallel of 2 or more"
        if self.fp8 != "none" and self.dtype != "bf16":
            yield "fp8: needs bf16 weights; set model.dtype=bf16, or model.fp8=none"
