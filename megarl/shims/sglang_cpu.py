"""What SGLang needs on a machine without a GPU; with one, nothing here does anything.

    install()             before the first import of sglang
    patch()               after it, before its first process

1. `install` provides a stand-in for `sgl_kernel`, of which no CPU build exists. SGLang imports names from it unconditionally,
   but without AMX its CPU path never calls them (norms, attention, rotary embedding and mixture of experts are plain torch
   there; the names serve speculative decoding). The stand-in answers every import; a call raises. It stands behind all other
   finders, so a real build wins.
2. Processes are forked instead of spawned. SGLang spawns because CUDA does not survive a fork; without it a fork saves
   importing everything once more (about 10 CPU-seconds and 0.8 GB a process).
3. Chosen experts (enable_return_routed_experts) are kept in plain memory. SGLang registers it with CUDA.
4. Attention decodes requests together (sglang_cpu_attention.py).
5. Memory can be released (/release_memory_occupation). SGLang then waits for torch's device, which is CUDA for the CUDA build
   even where there is none.
"""

import importlib.machinery
import multiprocessing
import sys
import types
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

NAME = "sgl_kernel"


def install() -> None:
    """Make `import sgl_kernel` work in this process. Idempotent."""
    if not torch.cuda.is_available() and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


def patch() -> None:
    """Apply 2 to 5 to this process."""
    if torch.cuda.is_available():
        return
    from sglang.srt.entrypoints import engine
    from sglang.srt.mem_cache.pool_host import common

    from megarl.shims import sglang_cpu_attention

    prepare, module_of = engine._set_envs_and_config, torch.get_device_module

    def prepare_then_fork(server_args: object) -> None:
        prepare(server_args)  # SGLang's last step before the first process: it asks for `spawn`
        multiprocessing.set_start_method("fork", force=True)

    engine._set_envs_and_config = prepare_then_fork
    common.ALLOC_MEMORY_FUNCS["cpu"] = lambda dims, dtype, device, pin_memory, allocator: allocator.allocate(
        dims, dtype=dtype, device=device
    )
    sglang_cpu_attention.install_attention()
    torch.get_device_module = lambda device=None: module_of(device or "cpu")


class _Finder:
    """Finder and loader of `sgl_kernel` and its submodules."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != NAME:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__version__ = "0.0.0"  # type: ignore[attr-defined]


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args: object, **kwargs: object) -> NoReturn:
            raise NotImplementedError(f"sgl_kernel.{name}: there is no CPU build of sgl_kernel")

        return missing
