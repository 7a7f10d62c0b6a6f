"""torch_memory_saver, with which a server gives the memory of its KV cache back
(Recipe.lends_memory).

    SGLang starts a rank with
    LD_PRELOAD=…/torch_memory_saver_hook_mode_preload_cu13.abi3.so
                    │ needs libcuda.so.1 and libcudart.so.13
    the system's loader ──finds both──► the rank runs, and its memory can be released
                        └──lacks one──► the rank ends before its first line, with the
                                        loader's message

A container's CUDA toolkit has libcudart where the loader looks. An environment made by
pip has it in a package of torch, where only torch looks.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from megarl.core.base.errors import MegarlError

LIBRARY_PATH = "LD_LIBRARY_PATH"
HOOK = "torch_memory_saver_hook_mode_preload"
RUNTIME = "nvidia/cu*/lib/libcudart.so.*"
"""Where torch's packages have CUDA's runtime, below the folder of packages."""
IGNORED = "from LD_PRELOAD cannot be preloaded"
"""The loader's words for a library that it does not find at all: it goes on without it.
It says the same of what a site has in /etc/ld.so.preload.
"""
LIMIT_S = 30.0


def library_path(packages: Path | None = None) -> dict[str, str]:
    """Return LD_LIBRARY_PATH with the folder of torch's CUDA runtime added at its end.

    packages: the folder of installed packages; by default torch's own. Empty if there
    is no such runtime, or if the path has its folder already.
    """
    torch = find_spec("torch")
    if packages is None and torch is not None and torch.origin is not None:
        packages = Path(torch.origin).parents[1]
    if packages is None:
        return {}
    runtimes = sorted(packages.glob(RUNTIME), key=version)
    present = [folder for folder in os.environ.get(LIBRARY_PATH, "").split(os.pathsep) if folder]
    if not runtimes or str(runtimes[-1].parent) in present:
        return {}
    return {LIBRARY_PATH: os.pathsep.join([*present, str(runtimes[-1].parent)])}


def version(runtime: Path) -> int:
    """Return the major version in the name of a `libcudart.so.13`. A package may bring
    an older one, too.
    """
    return int(runtime.name.split(".")[2])


def check_preload(hook: Path, environment: Mapping[str, str]) -> None:
    """Raise MegarlError with the loader's message if a Python cannot be started with
    this library.

    hook: what SGLang preloads (`installed_hook`). environment: that of the ranks.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-S", "-E", "-c", ""],
            env={**environment, "LD_PRELOAD": str(hook)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise MegarlError(
            f"resources.colocate: a Python with {hook}, by which servers lend memory to the"
            f" learner, did not start within {LIMIT_S:g} s; is the disk with the environment slow?"
            " Start again"
        ) from None
    if done.returncode == 0 and IGNORED not in done.stderr:
        return
    message = done.stderr.strip() or f"it ended with status {done.returncode}"
    raise MegarlError(
        f"resources.colocate: a server's ranks cannot be started with {hook}, by which they lend "
        f"memory to the learner: {message}. Add the folder of the missing library to {LIBRARY_PATH} "
        "(libcudart.so.13 is in lib64 of a CUDA 13 toolkit, libcuda.so.1 is the driver's), or set "
        "pipeline.k to 1 or more, with which servers keep their memory"
    )


def installed_hook() -> Path:
    """Return torch_memory_saver's installed library for torch's CUDA version."""
    from torch_memory_saver.utils import get_binary_path_from_package

    try:
        return Path(get_binary_path_from_package(HOOK))
    except RuntimeError as error:
        raise MegarlError(f"resources.colocate: {error}") from None
