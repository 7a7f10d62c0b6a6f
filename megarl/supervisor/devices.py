"""Which GPUs this machine has and who gets which. Asks `nvidia-smi`, so the supervisor need not import torch.

servers first, server_tensor_parallel each │ then one for each learner rank
0 1 │ 2 3 │                                  4 5 6 7
"""

import os
import shutil
import subprocess

from megarl.errors import MegarlError
from megarl.recipe import Recipe
from megarl.supervisor.restart import Role


def gpus() -> tuple[str, ...]:
    """Names CUDA_VISIBLE_DEVICES takes: what it says, else all that nvidia-smi lists; empty without a GPU."""
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
    """GPUs the recipe divides among its roles."""
    resources = recipe.resources
    return resources.servers * resources.server_tensor_parallel + resources.learner_ranks


def divide(recipe: Recipe, available: tuple[str, ...]) -> dict[Role, tuple[str, ...]]:
    """The GPUs of each role; all empty where there is none (the CPU stack). MegarlError if there are too few."""
    resources = recipe.resources
    if available and len(available) < needed(recipe):
        raise MegarlError(
            f"resources: {resources.servers} servers x {resources.server_tensor_parallel} GPUs + {resources.learner_ranks} "
            f"learner ranks need {needed(recipe)} GPUs, and {len(available)} are visible ({','.join(available)}). Lower "
            "resources.servers, resources.server_tensor_parallel or resources.learner_ranks, or set CUDA_VISIBLE_DEVICES= "
            "to run a tiny model on the CPU"
        )
    shares = of_servers(recipe, available)
    shares[Role("controller")] = ()
    shares[Role("learner")] = available[resources.servers * resources.server_tensor_parallel :][
        : resources.learner_ranks
    ]
    return shares


def of_servers(recipe: Recipe, available: tuple[str, ...]) -> dict[Role, tuple[str, ...]]:
    """The GPUs of each server; MegarlError if there are too few."""
    count, width = recipe.resources.servers, recipe.resources.server_tensor_parallel
    if available and len(available) < count * width:
        raise MegarlError(
            f"resources: {count} servers x {width} GPUs need {count * width}, and {len(available)} are visible "
            f"({','.join(available)}); lower resources.servers or resources.server_tensor_parallel, or set "
            "CUDA_VISIBLE_DEVICES= to serve a tiny model on the CPU"
        )
    return {Role("server", i): available[i * width : (i + 1) * width] for i in range(count)}
