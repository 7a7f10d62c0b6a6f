"""Which GPUs this machine has. Asks `nvidia-smi`, so the supervisor need not import torch."""

import os
import shutil
import subprocess

from megarl.core.recipe import Recipe


def gpus() -> tuple[str, ...]:
    """Return GPU names as CUDA_VISIBLE_DEVICES takes them: its value if set, else all of nvidia-smi; empty without a GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(part.strip() for part in visible.split(",") if part.strip())
    if shutil.which("nvidia-smi") is None:
        return ()
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        return ()
    return tuple(line.strip() for line in listed.stdout.splitlines() if line.strip()) if listed.returncode == 0 else ()


def needed(recipe: Recipe) -> int:
    """Return the number of GPUs that the recipe divides among its roles."""
    resources = recipe.resources
    servers = 0 if resources.colocate else resources.servers * resources.server_tensor_parallel
    return servers + resources.learner_ranks
