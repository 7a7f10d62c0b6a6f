"""Transport: the learner writes a Hugging Face directory that every server loads. Slow,
but needs only a shared file system.

RUN/weights/v7/  ◄── all ranks write
     └────────► each server: update_weights_from_disk

The newest KEEP directories are kept. If deltas are sent, one has only their files. A
whole directory is in the learner's type; servers in FP8 quantise what they read, as at
their start (sync/block_fp8.py).
"""

import shutil
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import save_file

from megarl.core.base.ranks import from_rank_0, gathered
from megarl.core.client.fleet import Fleet
from megarl.core.models import hf
from megarl.core.sync.sent_deltas import LastSent
from megarl.core.sync.served_weights import ServedWeights
from megarl.core.sync.transport import Sent, SentChecksums, holds_whole_parameters, merged

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
            # Left by an earlier incarnation, perhaps with other weights.
            shutil.rmtree(path, ignore_errors=True)
        from_rank_0(None)
        total = merged(gathered(self._write(fleet, ids, path)))
        errors: dict[int, str] = {}
        if dist.get_rank() == 0:
            errors = fleet.call_each(ids, lambda server: server.load(str(path.resolve()), version))[
                1
            ]
            self._remove_old(path)
        size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        return replace(total, errors=from_rank_0(errors), bytes=size)

    def _write(self, fleet: Fleet, ids: Sequence[int], path: Path) -> Sent:
        """Write the directory for the servers `ids`. Return checksums of this rank's
        tensors. COLLECTIVE.
        """
        expert_ranks = self._weights.expert_ranks
        checksums = SentChecksums(self._weights.family.architecture, expert_ranks)
        tensors = self._weights.tensors()
        if holds_whole_parameters(fleet, ids, expert_ranks):
            tensors = checksums.watch(tensors)
        tensor_rank = parallel_state.get_tensor_model_parallel_rank()
        data_rank = parallel_state.get_data_parallel_rank(True)
        writes = tensor_rank == data_rank == 0
        if writes:
            tensors = self._last.changed(tensors)
        if self._last.sends_all:
            hf.save(self._weights.chunks, self._weights.family, self._source, path)
            deque(tensors, maxlen=0)
        else:
            path.mkdir(exist_ok=True)
            stage = parallel_state.get_pipeline_model_parallel_rank()
            file = path / f"stage-{stage:04}.safetensors"
            mine = {name: tensor.to("cpu", copy=True) for name, tensor in tensors}
            hf.everywhere(lambda: save_file(mine, file) if writes else None)
        expected = checksums.expected()
        expected_experts = checksums.expected_experts()
        return Sent({}, expected, 0, checksums.failed, expected_experts)

    def _remove_old(self, newest: Path) -> None:
        """Remove all but the newest KEEP directories."""
        earlier = [path for path in self._directory.glob("v*") if path != newest]
        earlier.sort(key=lambda path: path.stat().st_mtime)
        for path in earlier[: 1 - KEEP]:
            shutil.rmtree(path, ignore_errors=True)
