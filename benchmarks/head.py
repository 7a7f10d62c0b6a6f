"""Measures memory and time of the head, forward and backward, against plain ones: all
logits at once, in FP32 and in bf16.

    python -m benchmarks.head [--tokens 16384] [--vocabulary 128256] [--hidden 4096]
    [--dtype bf16] [--repeats 10] [--json]

It runs on a GPU if there is one, else on the CPU with smaller sizes. Each way starts
with the same hidden states and weight and ends with the gradients of both; the weight's
is added to an FP32 buffer, as in training. The peak is the most memory that a way holds
beyond those: by the GPU's allocator, or on a CPU by the storages alive after each
operation. Ways take turns, so that other load on the machine affects all of them; time
is the median.
"""

import argparse
import json
import statistics
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.core.models.head import logprobs_and_entropy

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SIZES = {
    "cuda": {"tokens": 16384, "vocabulary": 128256, "hidden": 4096, "repeats": 10},
    "cpu": {"tokens": 4096, "vocabulary": 64128, "hidden": 128, "repeats": 3},
}
"""An 8B model's micro-batch (Llama 3.1); for a CPU, half of its vocabulary and a small
width.
"""


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in SIZES[device].items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bf16", help="of hidden states and weight"
    )
    parser.add_argument(
        "--json", action="store_true", help="a line of JSON each instead of a table"
    )
    options = parser.parse_args()
    rows = measured(
        device, options.tokens, options.vocabulary, options.hidden, options.dtype, options.repeats
    )
    if options.json:
        for row in rows:
            print(json.dumps(row))
        return
    print(
        f"{options.tokens} tokens, vocabulary {options.vocabulary}, hidden {options.hidden},"
        f" {options.dtype}, {device}"
    )
    print(f"{'head':12} {'peak MB':>9} {'of plain fp32':>14} {'ms':>9} {'of plain bf16':>14}")
    for row in rows:
        ratios = (
            f"{row['memory_of_plain_fp32']:14.3f} {row['seconds'] * 1e3:9.1f}"
            f" {row['time_of_plain_bf16']:14.2f}"
        )
        print(f"{row['head']:12} {row['peak_bytes'] / 1e6:9.1f} {ratios}")


def measured(
    device: str, tokens: int, vocabulary: int, hidden: int, dtype: str, repeats: int
) -> list[dict[str, Any]]:
    """Return a row for each way: peak_bytes and seconds of forward and backward, and
    their ratios to the plain ways'.
    """
    problem = Problem(device, tokens, vocabulary, hidden, DTYPES[dtype])
    ways: dict[str, Callable[[], None]] = {
        "megarl": problem.megarl,
        "plain fp32": lambda: problem.plain(torch.float32),
        "plain bf16": lambda: problem.plain(torch.bfloat16),
    }
    peaks: dict[str, int] = {}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for name, way in ways.items():
        problem.forget()
        peaks[name] = peak(way, device)  # the first run of each, which is not timed
    for _ in range(repeats):
        for name, way in ways.items():
            problem.forget()
            seconds[name].append(timed(way, device))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return [
        {
            "head": name,
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "tokens": tokens,
            "vocabulary": vocabulary,
            "hidden": hidden,
            "dtype": dtype,
            "peak_bytes": peaks[name],
            "seconds": medians[name],
            "memory_of_plain_fp32": peaks[name] / peaks["plain fp32"],
            "memory_of_plain_bf16": peaks[name] / peaks["plain bf16"],
            "time_of_plain_fp32": medians[name] / medians["plain fp32"],
            "time_of_plain_bf16": medians[name] / medians["plain bf16"],
        }
        for name in ways
    ]


class Problem:
    """Hidden states, a head and labels; the loss is a sum over log-probs and entropies
    with fixed weights.
    """

    def __init__(
        self, device: str, tokens: int, vocabulary: int, hidden: int, dtype: torch.dtype
    ) -> None:
        random = torch.Generator(device).manual_seed(0)
        self.hidden = (
            torch.randn(tokens, hidden, device=device, generator=random).to(dtype).requires_grad_()
        )
        weight = torch.randn(vocabulary, hidden, device=device, generator=random) / hidden**0.5
        self.weight = weight.to(dtype).requires_grad_()
        self.weight.main_grad = torch.zeros_like(weight)
        self.labels = torch.randint(0, vocabulary, (tokens,), device=device, generator=random)
        self.upstream = torch.randn(2, tokens, device=device, generator=random)
        self.vocabulary = vocabulary

    def megarl(self) -> None:
        self.backward(
            *logprobs_and_entropy(self.hidden, self.weight, self.labels, vocab_size=self.vocabulary)
        )

    def plain(self, precision: torch.dtype) -> None:
        """Compute all logits by a product in `precision`, and the rest in FP32 with
        autograd.
        """
        logits = self.hidden.to(precision) @ self.weight.to(precision).T
        log_p = torch.log_softmax(logits.float(), -1)
        self.backward(log_p.gather(-1, self.labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1))
        self.weight.main_grad.add_(self.weight.grad)

    def backward(self, logprobs: Tensor, entropy: Tensor) -> None:
        (self.upstream[0] @ logprobs + self.upstream[1] @ entropy).backward()

    def forget(self) -> None:
        self.hidden.grad = self.weight.grad = None


def peak(way: Callable[[], None], device: str) -> int:
    """Return the most bytes that a way allocates beyond those allocated before it."""
    if device == "cpu":
        with LiveBytes() as live:
            way()
        return live.peak
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    way()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def timed(way: Callable[[], None], device: str) -> float:
    """Return the seconds of one run."""
    begin = time.perf_counter()
    way()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live storages made by operations. peak: the most after any
    operation.
    """

    live = peak = 0

    def __init__(self) -> None:
        super().__init__()
        self.seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {
            t.untyped_storage()
            for t in torch.utils._pytree.tree_leaves((args, kwargs))
            if isinstance(t, Tensor)
        }
        made = func(*args, **kwargs or {})
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, Tensor):
                self.count(tensor.untyped_storage(), before)
        return made

    def count(self, storage: torch.UntypedStorage, before: set[torch.UntypedStorage]) -> None:
        if storage in before or storage in self.seen:
            return
        self.seen.add(storage)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self.freed, storage.nbytes())

    def freed(self, size: int) -> None:
        self.live -= size


if __name__ == "__main__":
    main()
