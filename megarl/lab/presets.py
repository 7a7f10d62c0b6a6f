"""`megarl recipes suggest --model DIR`: a recipe for a model, with numbers for its size from one of two sources:

scalerl  the settings of ScaleRL's paper (arXiv 2510.13786), which are the same for 8B dense and 17Bx16. The default.
ppo      ranges by model size from guides to PPO and GRPO, for PPO with a critic: rules of thumb without a scaling study.
         From a range, the recipe takes the end that changes the policy less.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml
from rich.table import Column, Table

from megarl.core.base import architecture, terminal
from megarl.core.base.errors import MegarlError
from megarl.core.base.weight_files import parameters
from megarl.core.recipe.loading import load


@dataclass(frozen=True)
class Preset:
    """Ranges (low, high) for models of up to `parameters`. batch: rollouts per step; kl: coefficient of the reference's KL."""

    size: str
    parameters: float
    lr: tuple[float, float]
    batch: tuple[int, int]
    epochs: tuple[int, int]
    warmup_steps: tuple[int, int]
    kl: tuple[float, float]


PPO = (
    Preset("1B-7B", 7e9, (3e-6, 1e-5), (256, 512), (4, 8), (100, 500), (0.05, 0.1)),
    Preset("7B-70B+", float("inf"), (1e-6, 3e-6), (512, 2048), (2, 4), (500, 2000), (0.01, 0.05)),
)
SCALERL = Preset("8B, 17Bx16", float("inf"), (5e-7, 5e-7), (768, 2048), (1, 1), (100, 100), (0.0, 0.0))
NOTE = """# The layout (model.tensor_parallel, resources) is that of the base: fit it to your GPUs.
# Give data.tasks (train, heldout), and start from a model that follows the prompt format (`megarl sft`).
"""
ROWS = {
    "learning rate": "lr", "rollouts a step": "batch", "epochs": "epochs", "warm-up steps": "warmup_steps", "KL": "kl",
}  # fmt: skip


def suggest(model: Path, preset: Literal["scalerl", "ppo"]) -> int:
    """Print the recipe on stdout, and both sources' numbers on stderr. MegarlError if the directory holds no model."""
    if not (model / "config.json").is_file():
        raise MegarlError(f"--model: {model} is not a Hugging Face directory (no config.json in it)")
    count = _parameters(model)
    chosen = ppo_for(count)
    columns = [Column(name, no_wrap=True, style="bold" if name == preset else "") for name in ("", "scalerl", "ppo")]
    shown = Table(*columns, box=None, padding=(0, 2), pad_edge=False)
    shown.add_row("models", SCALERL.size, chosen.size)
    for name, attribute in ROWS.items():
        ranges = (dict.fromkeys(getattr(one, attribute)) for one in (SCALERL, chosen))
        shown.add_row(name, *(" - ".join(f"{end:g}" for end in ends) for ends in ranges))
    console = terminal.console(stderr=True)
    console.print(f"{model}: {count / 1e9:.2f}B parameters", soft_wrap=True, highlight=False)
    console.print(shown)
    if count < 1e9:
        console.print("Both are for models of 1B parameters and more; a smaller one needs a higher learning rate.")
    print(text(model, preset, chosen), end="")
    return 0


def _parameters(model: Path) -> int:
    """Count parameters by the weights or, in a directory without any, by its config.json."""
    if any(model.glob("*.safetensors*")):
        return parameters(model)
    return architecture.read(str(model)).parameters


def ppo_for(count: int) -> Preset:
    return next(p for p in PPO if count <= p.parameters)


def text(model: Path, preset: Literal["scalerl", "ppo"], chosen: Preset) -> str:
    """Return the text of a recipe file. The number of rollouts per prompt is that of the base recipe."""
    base = "scalerl-8b" if preset == "scalerl" else "ppo-critic-8b"
    tree: dict[str, object] = {"base": base, "run": {"name": f"{model.name}-rl"}, "model": {"path": str(model)}}
    if preset == "ppo":
        optimizer = {"lr": chosen.lr[0], "warmup_steps": chosen.warmup_steps[0]}
        tree["batch"] = {"prompts": chosen.batch[0] // load(base).sampling.generations}
        tree["learner"] = {"epochs": chosen.epochs[0], "optimizer": optimizer}
        tree["reference"] = {"coefficient": chosen.kl[0]}
    return NOTE + yaml.safe_dump(tree, sort_keys=False)
