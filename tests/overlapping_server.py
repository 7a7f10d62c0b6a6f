"""`megarl serve`, as a process that a test forks, with a setting that megarl has on
GPUs only. This module imports little: SGLang's processes hide megatron.
"""

from megarl.core.base.architecture import Architecture
from megarl.core.engine import launch
from megarl.core.recipe import Recipe
from tests.processes import command_line


def serve_with_overlap(arguments: list[str]) -> int:
    """Serve delta networks without a prefix cache, each step prepared while another one
    runs.
    """
    make = launch.state_arguments

    def with_overlap(recipe: Recipe, model: Architecture, cuda: bool) -> dict[str, object]:
        made = make(recipe, model, cuda)
        del made["mamba_radix_cache_strategy"]
        return made | {"disable_radix_cache": True, "disable_overlap_schedule": False}

    launch.state_arguments = with_overlap
    return command_line(arguments)
