"""Measures AdamW on the host's cores, as learner.optimizer_offload has it: an optimiser
for each parameter, in torch's default form for a CPU and fused, in turn.

    python -m benchmarks.offload [--tensors 300] [--size 400000] [--threads 1]
    [--repeats 5]

Bytes are those that one pass reads and writes: FP32 weight, gradient and two moments
are read, all but the gradient are written. The last line says by how much the weights
of the two differ at most, after all steps, in units of the learning rate.
"""

import argparse
import statistics
import time

import torch
from torch import Tensor
from torch.optim import AdamW

from megarl.core.learner.optimizer import BETAS, EPS, WEIGHT_DECAY

RATE = 1e-6
BYTES = 7 * 4
"""For each parameter and step."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--size", type=int, default=400_000, help="numbers of a tensor")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    weights = [torch.randn(options.size) for _ in range(options.tensors)]
    gradients = [1e-3 * torch.randn(options.size) for _ in weights]
    ways = {name: optimisers(weights, gradients, name == "fused") for name in ("default", "fused")}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(options.repeats + 1):
        for name, parts in ways.items():
            begin = time.perf_counter()
            for part in parts:
                part.step()
            if repeat:  # the first makes the moments
                seconds[name].append(time.perf_counter() - begin)
    count = options.tensors * options.size
    print(f"{count / 1e6:.0f}M parameters in {options.tensors} tensors, {options.threads} threads")
    print(f"{'':>8} {'seconds':>8} {'GB/s':>6}")
    for name, each in seconds.items():
        median = statistics.median(each)
        print(f"{name:>8} {median:>8.3f} {count * BYTES / 1e9 / median:>6.1f}")
    pairs = zip(*(map(weight_of, parts) for parts in ways.values()), strict=True)
    furthest = max(float((one - other).abs().max()) for one, other in pairs)
    print(f"weights differ by at most {furthest / RATE:.2g} learning rates")


def optimisers(weights: list[Tensor], gradients: list[Tensor], fused: bool) -> list[AdamW]:
    """Return an AdamW for a copy of each weight, with megarl's settings."""
    made = []
    for weight, gradient in zip(weights, gradients, strict=True):
        copy = weight.clone()
        copy.grad = gradient
        made.append(AdamW([copy], RATE, BETAS, EPS, weight_decay=WEIGHT_DECAY, fused=fused or None))
    return made


def weight_of(optimiser: AdamW) -> Tensor:
    (weight,) = optimiser.param_groups[0]["params"]
    return weight


if __name__ == "__main__":
    main()
