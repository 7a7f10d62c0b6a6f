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
6. `install` makes torch.compile return its function: launch.py disables it, but each use would still import the compiler (1 to
   2 CPU-seconds).
"""

import importlib.machinery
import importlib.util
import multiprocessing
import sys
import types
from collections.abc import Callable
from typing import NoReturn

import torch

NAME = "sgl_kernel"


def install() -> None:
    """Apply 1 and 6 to this process. Idempotent."""
    if torch.cuda.is_available():
        return
    torch.compile = _not_compiled
    if importlib.util.find_spec(NAME) is None:
        module = sys.modules[NAME] = _StandIn(NAME)
        spec = importlib.machinery.ModuleSpec(NAME, None, is_package=True)
        vars(module).update(__version__="0.0.0", __spec__=spec, __path__=[])


def patch() -> None:
    """Apply 2 to 5 to this process."""
    if torch.cuda.is_available():
        return
    from sglang.srt.entrypoints import engine
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.mem_cache.pool_host import common

    from megarl.shims.sglang_cpu_attention import BatchedDecode

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


def _not_compiled(function: Callable[..., object] | None = None, **_: object) -> Callable[..., object]:
    return function if function is not None else _not_compiled


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args: object, **kwargs: object) -> NoReturn:
            raise NotImplementedError(f"sgl_kernel.{name}: there is no CPU build of sgl_kernel")

        return missing
