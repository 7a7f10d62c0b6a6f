"""The learner's weights in the form in which servers hold them: what every transport
sends.

megatron's parameters ──hf.export──► Hugging Face tensors
    ──► servers in the model's type
    ──block_fp8.quantised──► servers with serving.quantization: fp8
"""

from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.nn import Module

from megarl.core.models import hf
from megarl.core.models.families import Family
from megarl.core.sync.block_fp8 import quantised


class ServedWeights:
    """One rank's weights. fp8: servers hold linear maps in FP8, with their scales.
    expert_ranks: a server's ranks if each has whole experts, else 1.
    """

    def __init__(
        self, chunks: Sequence[Module], family: Family, fp8: bool, expert_ranks: int = 1
    ) -> None:
        self.chunks = chunks
        self.family = family
        self.expert_ranks = expert_ranks
        self._fp8 = fp8

    def tensors(self, part: int = 0, parts: int = 1) -> Iterator[tuple[str, Tensor]]:
        """Yield this pipeline stage's tensors, or one of `parts` parts, each expert
        under a name of its own. COLLECTIVE, like `hf.export`: a rank that sends nothing
        iterates over `gathered`.
        """
        return self.as_served(self.gathered(part, parts))

    def gathered(self, part: int = 0, parts: int = 1) -> Iterator[tuple[str, Tensor]]:
        """Yield the same tensors before they are quantised. COLLECTIVE, as above."""
        return hf.export(self.chunks, self.family, stacked=False, part=part, parts=parts)

    def as_served(self, gathered: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors of `gathered` in the form in which servers hold them."""
        return quantised(gathered) if self._fp8 else gathered
