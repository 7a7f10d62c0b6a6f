"""Checkpoints of an AdamW that, as Transformer Engine's, has no state before its first
step and counts steps in its group.

`python -m tests.stand_in_gpu.fused_adam DIR FILE`: DIR has a Hugging Face directory
`llama`; FILE gets, as JSON, for each share in the host's memory, the metrics of a run
that was saved before its first step and after it, and those of resumed runs.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests import stand_in_gpu

if __name__ == "__main__":
    stand_in_gpu.install()

from megarl.core import recipe as recipes
from megarl.core.learner.checkpoint import Checkpoints
from megarl.core.learner.trainer import Trainer
from megarl.core.models import parallel
from megarl.core.recipe import Recipe
from tests.parallel.test_learner_layouts import make_batch

# isort: split
from megatron.core import optimizer
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

OFFLOADS = (0.0, 0.5)
MEASURED = ("loss", "grad_norm", "entropy")


class FusedAdam(torch.optim.Optimizer):
    """AdamW with the state of Transformer Engine's, by torch's operations."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(
            params, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0} | settings
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                if not state:
                    state.update(
                        {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                    )
                (first, second) = (state["exp_avg"], state["exp_avg_sq"])
                (b1, b2) = group["betas"]
                first.lerp_(parameter.grad, 1 - b1)
                second.mul_(b2).addcmul_(parameter.grad, parameter.grad, value=1 - b2)
                divisor = (second / (1 - b2 ** group["step"])).sqrt() + group["eps"]
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.addcdiv_(first, divisor, value=-group["lr"] / (1 - b1 ** group["step"]))


def install_fused_adam() -> None:
    """Have megatron find it installed, as it finds Transformer Engine's."""
    optimizer.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.Adam = FusedAdam
    distrib_optimizer.HAVE_APEX_OR_TE = True
    distrib_optimizer.USING_TE_OPTIMIZER = True


def measured(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Take three steps; store before the first and after it, and take the steps that
    follow by trainers that load this.
    """
    source = Path(recipe.model.path)
    trainer = Trainer(recipe, source)
    trainer.step = 1  # it was skipped: only later steps are stored
    sequences = trainer.sequences(make_batch())
    found: dict[str, Any] = {"classes": classes(trainer), "rows": []}
    for step in range(3):
        if step < 2:
            checkpoints = Checkpoints(folder / str(step), 1, trainer, source)
            checkpoints.save()
            checkpoints.finish()
        found["rows"].append(row(trainer, sequences))
    for step in range(2):
        again = Trainer(recipe, source)
        assert Checkpoints(folder / str(step), 1, again, source).load_latest()
        found[f"resumed after {step}"] = [row(again, sequences) for _ in range(step, 3)]
        found[f"counted after {step}"] = counted(again)
    return found


def row(trainer: Trainer, sequences: Any) -> dict[str, float]:
    measured = trainer.train_step(sequences)
    return {name: measured[name] for name in MEASURED}


def parts(trainer: Trainer) -> list[Any]:
    """The optimisers that update this rank's parameters."""
    found: list[Any] = []
    for part in (part.optimizer for part in trainer.policy.optimizer.chained_optimizers):
        found += part.sub_optimizers if isinstance(part, HybridDeviceOptimizer) else [part]
    return found


def classes(trainer: Trainer) -> list[str]:
    return sorted({type(part).__name__ for part in parts(trainer)})


def counted(trainer: Trainer) -> list[int]:
    """How many steps each fused AdamW has counted."""
    groups = [
        group
        for part in parts(trainer)
        if isinstance(part, FusedAdam)
        for group in part.param_groups
    ]
    return sorted({group["step"] for group in groups})


def main(directory: Path, file: Path) -> None:
    install_fused_adam()
    found = {}
    with stand_in_gpu.on_stand_in_gpu():
        for offload in OFFLOADS:
            settings = {"lr": 1e-3, "warmup_steps": 0}
            recipe = recipes.from_tree(
                {
                    "model": {"path": str(directory / "llama")},
                    "batch": {"prompts": 4},
                    "learner": {
                        "microbatch_tokens": 128,
                        "optimizer": settings,
                        "optimizer_offload": offload,
                    },
                }
            )
            parallel.start(recipe.model, seed=1, timeout_s=60)
            found[str(offload)] = measured(recipe, directory / str(offload))
    file.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
