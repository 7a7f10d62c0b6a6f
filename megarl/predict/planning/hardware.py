"""hardware.yaml as records, in bytes, seconds and FLOP/s."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megarl.core.base.errors import MegarlError

GB = 1e9


@dataclass(frozen=True)
class Gpu:
    """One accelerator, in bytes, bytes/s (one way) and FLOP/s (dense); from `training`
    on, values fitted in hardware.yaml.
    """

    name: str
    memory: float
    memory_rate: float
    bf16: float
    fp8: float
    nvlink: float
    nvlink_gpus: int
    network: float
    host: float
    host_memory: float
    capability: str
    training: float
    fp8_training: float
    serving: float
    expert_layer_s: float
    decode_expert_layer_s: float

    @property
    def node_gpus(self) -> int:
        """Most GPUs of one machine: a compute tray of an NVL72 has four."""
        return 4 if self.nvlink_gpus > 8 else 8

    @property
    def usable(self) -> float:
        """Bytes that tensors can use."""
        return self.memory * (1 - ASSUMED.fragmentation) - ASSUMED.reserved_gb * GB


UNITS = {
    "hbm_gb": GB,
    "hbm_gb_s": GB,
    "bf16_tflops": 1e12,
    "fp8_tflops": 1e12,
    "nvlink_gb_s": GB,
    "nvlink_gpus": 1,
    "network_gb_s": GB,
    "host_gb_s": GB,
    "host_gb": GB,
    "capability": 1,
}
"""The columns of hardware.yaml in the order of `Gpu`'s fields, each with its unit.
capability is a text, such as 9.0.
"""


@dataclass(frozen=True)
class Assumed:
    """Values that no datasheet gives; see hardware.yaml."""

    bandwidth_efficiency: float
    layer_s: float
    decode_layer_s: float
    prefill_expert_layer_s: float
    decode_efficiency: float
    network_efficiency: float
    decode_overhead_s: float
    allreduce_latency_s: float
    hop_latency_s: float
    control_seconds: float
    parity_seconds: float
    call_seconds: float
    host_gb_s: float
    reserved_gb: float
    fragmentation: float
    static_share: float


_TREE = yaml.safe_load((Path(__file__).parent / "hardware.yaml").read_text())
_FITTED = _TREE["fitted"]


def _gpu(name: str, row: dict[str, Any]) -> Gpu:
    """Return the record of a row of hardware.yaml."""
    datasheet = [row[key] * unit for key, unit in UNITS.items()]
    fitted = _FITTED["general"] | _FITTED.get(name, {})
    return Gpu(name, *datasheet, **fitted)


GPUS = {name: _gpu(name, row) for name, row in _TREE["gpus"].items()}
ASSUMED = Assumed(**_TREE["assumed"])
ERRORS: dict[str, float] = _TREE["errors"]
"""Relative errors of estimates (training, generation, publication): half of the
published rows have a smaller one.
"""
STEP_TAKES: tuple[float, float] = tuple(_TREE["step_takes"])
"""Published seconds of a step of RL over planned ones: a tenth of the rows lie below, a
tenth above.
"""


def gpu_named(name: str) -> Gpu:
    """Return a GPU's record. MegarlError if it is not in hardware.yaml."""
    if name not in GPUS:
        raise MegarlError(
            f"--gpu: {name!r} is not known; known: {', '.join(GPUS)}. Its numbers would go into"
            " hardware.yaml"
        )
    return GPUS[name]
