"""Transport: the learner writes a Hugging Face directory that every server loads. Slow,
but needs only a shared file system.

RUN/weights/v7/  ◄── all ranks write          the newest KEEP are kept; if deltas are sent, it has only their files
     └────────► each server: update_weights_from_disk

A whole directory is in the learner's type; servers in FP8 quantise what they read, as
at their start (base/block_fp8.py).
"""

import shutil
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import save_file

from megarl.core.base.ranks import from_rank_0, gathered
from megarl.core.models import hf
from megarl.core.server.fleet import Fleet
from megarl.core.weights.deltas import LastSent
from megarl.core.weights.served_weights import ServedWeights
from megarl.core.weights.transport import Sent, SentChecksums, holds_whole_parameters

KEEP = 2


class DiskTransport:
    """Sends weights from a learner rank to the servers through a directory. `send` is
    collective over all ranks.
    """

    staged = False

    def __init__(
        self, weights: ServedWeights, last: LastSent, source: Path, directory: Path
    ) -> None:
        """source: the Hugging Face directory to copy the configuration from."""
        self._weights = weights
        self._last = last
        self._source = source
        self._directory = directory

    def send(self, fleet: Fleet, ids: Sequence[int], version: int) -> Sent:
        """Send the weights to the paused servers `ids`. Every rank returns the same
        result. COLLECTIVE.
        """
        path = self._directory / f"v{version}"
        if dist.get_rank() == 0:
            self._directory.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(
                path, ignore_errors=True
            )  # left by an earlier incarnation, perhaps with other weights
        from_rank_0(None)
        expert_ranks = self._weights.expert_ranks
        sums = SentChecksums(self._weights.family.architecture, expert_ranks)
        tensors = self._weights.tensors()
        sent = sums.watch(tensors) if holds_whole_parameters(fleet, ids, expert_ranks) else tensors
        writes = (
            parallel_state.get_tensor_model_parallel_rank()
            == parallel_state.get_data_parallel_rank(True)
            == 0
        )
        if writes:
            sent = self._last.changed(sent)
        if self._last.whole:
            hf.save(self._weights.chunks, self._weights.family, self._source, path)
            deque(sent, maxlen=0)
        else:
            path.mkdir(exist_ok=True)
            file = (
                path / f"stage-{parallel_state.get_pipeline_model_parallel_rank():04}.safetensors"
            )
            mine = {name: tensor.to("cpu", copy=True) for name, tensor in sent}
            hf.everywhere(lambda: save_file(mine, file) if writes else None)
        expected = sums.expected()
        expected_experts = sums.expected_experts()
        every = gathered(Sent({}, expected, 0, sums.failed, expected_experts))
        checksums = {name: value for sent in every for name, value in sent.checksums.items()}
        experts = {part: value for sent in every for part, value in sent.experts.items()}
        unchecked = next((sent.unchecked for sent in every if sent.unchecked), "")
        errors: dict[int, str] = {}
        if dist.get_rank() == 0:
            errors = fleet.each(ids, lambda server: server.load(str(path.resolve()), version))[1]
            others = sorted(
                (p for p in self._directory.glob("v*") if p != path),
                key=lambda p: p.stat().st_mtime,
            )
            for old in others[: 1 - KEEP]:
                shutil.rmtree(old, ignore_errors=True)
        size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        return Sent(from_rank_0(errors), checksums, size, unchecked, experts)
