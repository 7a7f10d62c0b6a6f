"""What SGLang needs on a machine without a GPU; with one, nothing here does anything.

1. A stand-in for `sgl_kernel`, of which no CPU build exists. SGLang imports names from it unconditionally, but without AMX
   its CPU path never calls them (norms, attention, rotary embedding and mixture of experts are plain torch there; the names
   serve speculative decoding). The stand-in answers every import; a call raises. It stands behind all other finders, so a
   real build wins.
2. Its processes are forked instead of spawned. SGLang spawns because CUDA does not survive a fork; without it a fork saves
   importing everything once more (about 10 CPU-seconds and 0.8 GB a process).
3. Chosen experts are kept in plain memory. SGLang registers it with CUDA.
4. Its attention decodes requests together (cpu_attention.py).
5. Memory can be released. SGLang then waits for torch's device, which is CUDA for the CUDA build even where there is none.
"""

import importlib.machinery
import multiprocessing
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

NAME = "sgl_kernel"


def install() -> None:
    """Make `import sgl_kernel` work in this process. Does nothing with a GPU, or the second time."""
    if not torch.cuda.is_available() and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


def fork_processes() -> None:
    """Make SGLang fork its scheduler: it asks for `spawn` in its last step before the first process. Nothing with a GPU."""
    if torch.cuda.is_available():
        return
    from sglang.srt.entrypoints import engine

    prepare = engine._set_envs_and_config

    def prepare_then_fork(server_args: Any) -> None:
        prepare(server_args)
        multiprocessing.set_start_method("fork", force=True)

    engine._set_envs_and_config = prepare_then_fork


def record_experts() -> None:
    """Let SGLang keep chosen experts (enable_return_routed_experts). Nothing with a GPU."""
    if torch.cuda.is_available():
        return
    from sglang.srt.mem_cache.pool_host import common

    common.ALLOC_MEMORY_FUNCS["cpu"] = _plain_memory


def _plain_memory(
    dims: tuple[int, ...], dtype: torch.dtype, device: str, pin_memory: bool, allocator: Any
) -> torch.Tensor:
    memory: torch.Tensor = allocator.allocate(dims, dtype=dtype, device=device)
    return memory


def batch_attention() -> None:
    """Use cpu_attention.py. Nothing with a GPU."""
    if not torch.cuda.is_available():
        from megarl.shims import sglang_cpu_attention

        sglang_cpu_attention.install_attention()


def wait_for_the_cpu() -> None:
    """Let SGLang release memory (/release_memory_occupation). Nothing with a GPU."""
    if torch.cuda.is_available():
        return
    module_of = torch.get_device_module
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

        def missing(*args: Any, **kwargs: Any) -> NoReturn:
            raise NotImplementedError(f"sgl_kernel.{name}: there is no CPU build of sgl_kernel")

        return missing
