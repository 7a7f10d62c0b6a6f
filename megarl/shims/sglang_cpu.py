"""Changes that SGLang needs on a machine without a GPU; with one, this module does
nothing.

    install()             before the first import of sglang
    patch()               after it, before its first process

1. `install` provides a stand-in for `sgl_kernel`, of which no CPU build exists. SGLang
   imports names from it unconditionally, but without AMX its CPU path never calls them
   (norms, attention, rotary embedding and mixture of experts are plain torch there; the
   names are for speculative decoding). The stand-in has every name; a call raises,
   except of what delta networks need (sglang_cpu_delta.py). A real build takes
   precedence.
2. Processes are forked instead of spawned. SGLang spawns because CUDA does not survive
   a fork; without CUDA, a fork avoids importing everything again (about 10 CPU-seconds
   and 0.8 GB per process).
3. Chosen experts (enable_return_routed_experts) are kept in ordinary memory, which
   SGLang would register with CUDA.
4. Attention decodes requests together (sglang_cpu_attention.py).
5. Memory can be released (/release_memory_occupation). SGLang then synchronises torch's
   device, which for the CUDA build is CUDA even without a GPU.
6. The FP32 head of bf16 weights is converted in pieces (bf16_on_cpu.py); SGLang
   converts all of it for each token that it decodes, which took more than half of a
   step with a vocabulary of 49,152.
7. Tokens are sampled with one random number a row. torch.multinomial draws one for each
   token of the vocabulary: for 96 rows of 49,152 tokens that takes 140 ms of a core,
   two thirds of a decode step of a model of 135 million parameters.
8. Experts of other ranks (serving.expert_parallel) are skipped.
9. Outputs of whole experts are summed and divided among copies of the attention by an
   all-reduce (serving.attention_copies); SGLang would use NCCL.
10. `install` makes torch.compile return its function: launch.py disables it, but each
   use would still import the compiler (1 to 2 CPU-seconds).
"""

import importlib.machinery
import importlib.util
import multiprocessing
import sys
import types
from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import pad

from megarl.shims import sglang_cpu_delta

NAME = "sgl_kernel"
BLOCK = 256
"""Columns of a block of probabilities (sample_rows)."""


def install() -> None:
    """Apply 1 and 10 of the list at the top to this process. Idempotent."""
    if torch.cuda.is_available():
        return
    torch.compile = _not_compiled
    if importlib.util.find_spec(NAME) is None:
        module = sys.modules[NAME] = _StandIn(NAME)
        spec = importlib.machinery.ModuleSpec(NAME, None, is_package=True)
        vars(module).update(__version__="0.0.0", __spec__=spec, __path__=[])
        sglang_cpu_delta.install()


def patch() -> None:
    """Apply 2 to 9 of the list at the top of this file to this process."""
    if torch.cuda.is_available():
        return
    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang.srt.entrypoints import engine
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.mem_cache.pool_host import common

    from megarl.shims.sglang_cpu_attention import BatchedDecode

    _convert_heads_in_pieces()
    _replace_multinomial()
    _skip_experts_of_other_ranks()
    prepare = engine._set_envs_and_config
    module_of = torch.get_device_module

    def prepare_then_fork(server_args: object) -> None:
        """Prepare as SGLang does, but for processes that are forked."""
        prepare(server_args)  # SGLang's last step before the first process; it sets `spawn`
        multiprocessing.set_start_method("fork", force=True)

    engine._set_envs_and_config = prepare_then_fork
    common.ALLOC_MEMORY_FUNCS["cpu"] = _allocate
    ATTENTION_BACKENDS["torch_native"] = BatchedDecode
    GroupCoordinator.reduce_scatterv = GroupCoordinator._deterministic_reduce_scatterv
    torch.get_device_module = lambda device=None: module_of(device or "cpu")


def _allocate(
    dims: object, dtype: torch.dtype, device: object, pin_memory: bool, allocator: Any
) -> object:
    """Replace SGLang's allocation of memory that is registered with CUDA."""
    return allocator.allocate(dims, dtype=dtype, device=device)


def _convert_heads_in_pieces() -> None:
    """Compute FP32 logits of bf16 weights by head_product. Heads with an adapter, or
    quantized, stay SGLang's. Idempotent.
    """
    from sglang.srt.layers.logits_processor import (
        LogitsProcessor,
        should_apply_lm_head_quant_method,
    )

    from megarl.shims.bf16_on_cpu import head_product

    original = LogitsProcessor._compute_lm_head
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def logits(
        self: Any, hidden: torch.Tensor, head: Any, *args: Any, **options: Any
    ) -> torch.Tensor:
        """Return the logits [tokens, vocabulary] of hidden [tokens, hidden]."""
        weight: Any = getattr(head, "weight", None)
        is_adapted = hasattr(head, "set_lora")
        is_quantized = should_apply_lm_head_quant_method(head, getattr(head, "quant_method", None))
        if self.use_fp32_lm_head and weight is not None and not is_adapted and not is_quantized:
            if weight.dtype == torch.bfloat16 and hidden.dtype == torch.bfloat16:
                return head_product(hidden, weight)
        return original(self, hidden, head, *args, **options)

    LogitsProcessor._compute_lm_head = logits


def sample_rows(probabilities: Tensor) -> Tensor:
    """Draw one column from each row, with a probability proportional to its value:
    first a block of columns, then one of it.

    probabilities: [rows, columns] FP32, not negative; the sum of a row is above 0, and
    need not be 1. Returns [rows] of int32. Running sums are FP64, so that rare tokens
    are as frequent as they should be.
    """
    rows = len(probabilities)
    padding = -probabilities.shape[1] % BLOCK
    blocks = pad(probabilities, (0, padding)).view(rows, -1, BLOCK)
    uniform = torch.rand(rows, 1, dtype=torch.float64)
    block, uniform = _draw(blocks.sum(dim=-1), uniform)
    column, _ = _draw(blocks[torch.arange(rows), block], uniform)
    return (block * BLOCK + column).to(torch.int32)


def _draw(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Choose an index for each row, and return what is left of its random number.

    weights: [rows, n]; uniform: [rows, 1] FP64 in [0, 1). Returns the indices [rows],
    and a number in [0, 1) for each row [rows, 1] that is independent of the index.
    """
    upper = weights.to(torch.float64).cumsum(dim=-1)
    total = upper[:, -1:]
    # rounding may give the total itself, which is beyond the last index
    below_total = torch.nextafter(total, torch.zeros_like(total))
    point = torch.minimum(uniform * total, below_total)
    index = torch.searchsorted(upper, point, right=True)
    weight = weights.gather(-1, index).to(torch.float64)
    lower = upper.gather(-1, index) - weight
    position = (point - lower) / weight
    return index.view(-1), position.clamp(0.0, 1.0 - torch.finfo(torch.float64).eps)


def _replace_multinomial() -> None:
    """Have SGLang's sampler of plain torch use sample_rows, but where requests have
    seeds of their own. Idempotent.
    """
    from sglang.srt.layers import sampler

    theirs = sampler.sampling_from_probs_torch
    if theirs.__module__ == __name__:
        return

    def sampled(
        probs: Tensor, sampling_seed: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Draw a token [rows] for each row of probabilities [rows, vocabulary]."""
        if sampling_seed is None:
            return sample_rows(probs)
        return theirs(probs, sampling_seed=sampling_seed, positions=positions)

    sampler.sampling_from_probs_torch = sampled


def _skip_experts_of_other_ranks() -> None:
    """Let plain torch skip the chosen experts that other ranks have. Idempotent.

    With expert parallelism SGLang numbers such a choice -1, which its kernels skip and
    its plain torch takes for an index.
    """
    from sglang.srt.layers.moe import fused_moe_native

    experts = fused_moe_native.moe_forward_native
    if hasattr(experts, "__wrapped__"):
        return

    @wraps(experts)
    def own_experts(layer: Any, x: Tensor, topk_output: Any, config: Any) -> Tensor:
        """Compute the chosen experts that this rank has: each choice as a row of its
        own, of one expert with weight 1. x [tokens, hidden]; topk_output: chosen
        experts and their weights [tokens, choices].
        """
        chosen = topk_output.topk_ids
        if layer.moe_ep_size == 1:
            return experts(layer, x, topk_output, config)
        outputs = x.new_zeros(*chosen.shape, x.shape[-1])
        tokens, choices = torch.nonzero(chosen >= 0, as_tuple=True)
        if len(tokens):
            one_each = topk_output._replace(
                topk_ids=chosen[tokens, choices][:, None],
                topk_weights=torch.ones_like(topk_output.topk_weights[tokens, choices][:, None]),
            )
            outputs[tokens, choices] = experts(layer, x[tokens], one_each, config)
        weighted = outputs.to(topk_output.topk_weights.dtype) * topk_output.topk_weights[..., None]
        return weighted.sum(dim=1).to(x.dtype)

    fused_moe_native.moe_forward_native = own_experts


def _not_compiled(
    function: Callable[..., object] | None = None, **_: object
) -> Callable[..., object]:
    """Act as torch.compile, which is called with a function or as `@compile(...)`, and
    return the function as it is.
    """
    return _not_compiled if function is None else function


class _StandIn(types.ModuleType):
    """A module that has every name, each a function that raises when it is called.
    Names such as `__file__` it lacks, for which Python asks every module.
    """

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        """Return the function of this name. AttributeError for Python's own names."""
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args: object, **kwargs: object) -> NoReturn:
            raise NotImplementedError(f"sgl_kernel.{name}: there is no CPU build of sgl_kernel")

        return missing
