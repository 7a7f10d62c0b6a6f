"""Changes that SGLang needs on a machine without a GPU; with one, this module does nothing.

    install()             before the first import of sglang
    patch()               after it, before its first process

1. `install` provides a stand-in for `sgl_kernel`, of which no CPU build exists. SGLang imports names from it unconditionally,
   but without AMX its CPU path never calls them (norms, attention, rotary embedding and mixture of experts are plain torch
   there; the names are for speculative decoding). The stand-in has every name; a call raises. A real build takes precedence.
2. Processes are forked instead of spawned. SGLang spawns because CUDA does not survive a fork; without CUDA, a fork avoids
   importing everything again (about 10 CPU-seconds and 0.8 GB per process).
3. Chosen experts (enable_return_routed_experts) are kept in ordinary memory, which SGLang would register with CUDA.
4. Attention decodes requests together (sglang_cpu_attention.py).
5. Memory can be released (/release_memory_occupation). SGLang then synchronises torch's device, which for the CUDA build is
   CUDA even without a GPU.
6. The FP32 head of bf16 weights is converted in pieces (bf16_on_cpu.py); SGLang converts all of it for each token that it
   decodes, which took more than half of a step with a vocabulary of 49,152.
7. Tokens are sampled with one random number each (sglang_cpu_sampling.py).
8. `install` makes torch.compile return its function: launch.py disables it, but each use would still import the compiler (1 to
   2 CPU-seconds).
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

NAME = "sgl_kernel"


def install() -> None:
    """Apply 1 and 8 to this process. Idempotent."""
    if torch.cuda.is_available():
        return
    torch.compile = _not_compiled
    if importlib.util.find_spec(NAME) is None:
        module = sys.modules[NAME] = _StandIn(NAME)
        spec = importlib.machinery.ModuleSpec(NAME, None, is_package=True)
        vars(module).update(__version__="0.0.0", __spec__=spec, __path__=[])


def patch() -> None:
    """Apply 2 to 7 to this process."""
    if torch.cuda.is_available():
        return
    from sglang.srt.entrypoints import engine
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.mem_cache.pool_host import common

    from megarl.shims.sglang_cpu_attention import BatchedDecode
    from megarl.shims.sglang_cpu_sampling import replace_multinomial

    _convert_heads_in_pieces()
    replace_multinomial()
    prepare, module_of = engine._set_envs_and_config, torch.get_device_module

    def prepare_then_fork(server_args: object) -> None:
        prepare(server_args)  # SGLang's last step before the first process; it sets `spawn`
        multiprocessing.set_start_method("fork", force=True)

    engine._set_envs_and_config = prepare_then_fork
    common.ALLOC_MEMORY_FUNCS["cpu"] = lambda dims, dtype, device, pin_memory, allocator: allocator.allocate(
        dims, dtype=dtype, device=device
    )
    ATTENTION_BACKENDS["torch_native"] = BatchedDecode
    torch.get_device_module = lambda device=None: module_of(device or "cpu")


def _convert_heads_in_pieces() -> None:
    """Compute FP32 logits of bf16 weights by head_product. Heads with an adapter, or quantized, stay SGLang's. Idempotent."""
    from sglang.srt.layers.logits_processor import LogitsProcessor, should_apply_lm_head_quant_method

    from megarl.shims.bf16_on_cpu import head_product

    whole = LogitsProcessor._compute_lm_head
    if hasattr(whole, "__wrapped__"):
        return

    @wraps(whole)
    def logits(self: Any, hidden: torch.Tensor, head: Any, *args: Any, **options: Any) -> torch.Tensor:
        weight: Any = getattr(head, "weight", None)
        adapted = hasattr(head, "set_lora")
        quantized = should_apply_lm_head_quant_method(head, getattr(head, "quant_method", None))
        if weight is None or adapted or quantized or not self.use_fp32_lm_head:
            return whole(self, hidden, head, *args, **options)
        if weight.dtype != torch.bfloat16 or hidden.dtype != torch.bfloat16:
            return whole(self, hidden, head, *args, **options)
        return head_product(hidden, weight)

    LogitsProcessor._compute_lm_head = logits


def _not_compiled(function: Callable[..., object] | None = None, **_: object) -> Callable[..., object]:
    return function if function is not None else _not_compiled


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args: object, **kwargs: object) -> NoReturn:
            raise NotImplementedError(f"sgl_kernel.{name}: there is no CPU build of sgl_kernel")

        return missing
