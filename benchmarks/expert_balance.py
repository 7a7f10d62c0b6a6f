"""Trains tiny twins of Llama 4 Scout and GLM-4.5 with and without balancing of experts:
capacity, balancing loss, biases.

    python -m benchmarks.expert_balance [--steps 80] [--arms scout scout-aux-1e-3 …]
    [--out FILE]

Scout's twin has Scout's routing: 16 experts in every layer, one per token, by sigmoid,
and a shared one; GLM's has 16 with biases, 2 per token. Both are trained from random
weights on the quickstart's traces, on 4 ranks at TP 2 x PP 2 x EP 2, by the learner's
own step. Then 256 other traces are scored as servers would do it, which drop no token,
and as a learner with each capacity factor would: `gap` is the effect of dropping.
transformers stands in for the server, as its log-probs are the same.

The capacity factor is not a key of the recipe; it is set here without megarl's
knowledge. FILE keeps one line per arm, and arms in it are not run again.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from transformers import AutoModelForCausalLM

from megarl.core import recipe as recipes
from megarl.core.algorithm.batch import TrainSequence
from megarl.core.base.messages import Score, ScoredRollout
from megarl.core.base.tokenizer import load_tokenizer
from megarl.core.learner.trainer import Trainer
from megarl.core.models import hf, parallel
from megarl.tasks.data.arithmetic import write
from megarl.tasks.data.arithmetic_models import LLAMA, LLAMA4, save_model
from megarl.tasks.data.traces import load_traces
from megarl.tools.sft import batches
from tests.parallel.worlds import run_world
from tests.tiny_scores import scores

RANKS = 4
LAYERS = 4
EXPERTS = 16
HELD_OUT = 256
TOKENS = 1024
"""Tokens of a step, which is one micro-batch. Each of the two ranks that share it has
512 of them, 32 per expert.
"""
CAPACITIES = (1.0, 1.25, 2.0)
LAYOUT = {"tensor_parallel": 2, "pipeline_parallel": 2, "expert_parallel": 2}
SCOUT = LLAMA4 | {
    "hidden_size": 80,
    "num_attention_heads": 10,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "intermediate_size_mlp": 256,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
}
GLM = LLAMA | {
    "model_type": "glm4_moe",
    "hidden_size": 80,
    "num_attention_heads": 10,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "use_qk_norm": False,
    "rope_parameters": LLAMA["rope_parameters"] | {"partial_rotary_factor": 0.5},
}
MODELS = {"scout": SCOUT, "glm": GLM}
ARMS: dict[str, dict[str, float]] = {
    "scout": {},
    "scout-aux-1e-2": {"aux_loss": 1e-2},
    "scout-capacity-1": {"capacity": 1.0},
    "scout-capacity-1.25": {"capacity": 1.25},
    "glm": {},
    "glm-bias-1e-2": {"bias_update_rate": 1e-2},
    "scout-aux-1e-3": {"aux_loss": 1e-3},
    "scout-capacity-2": {"capacity": 2.0},
    "glm-bias-1e-3": {"bias_update_rate": 1e-3},
    "scout-capacity-1.25-aux-1e-2": {"capacity": 1.25, "aux_loss": 1e-2},
    "glm-aux-1e-2": {"aux_loss": 1e-2},
}


class Watched:
    """Records what a rank's routers do: wanted [layers, experts] tokens, dropped
    [layers], and the choices of each pass.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.wanted, self.dropped = torch.zeros(LAYERS, EXPERTS), torch.zeros(LAYERS)
        self.choices: list[Tensor] = []
        self.routers = [
            m for c in trainer.policy.chunks for m in c.modules() if isinstance(m, TopKRouter)
        ]
        for router in self.routers:
            router.register_forward_hook(self._see)

    @torch.no_grad()
    def _see(
        self, router: Any, inputs: tuple[Tensor, Tensor | None], outputs: tuple[Tensor, Tensor]
    ) -> None:
        map_ = outputs[1]
        padding = inputs[1]  # there is no padding mask outside training
        here = torch.ones(len(map_), dtype=torch.bool) if padding is None else ~padding.reshape(-1)
        if router.topk == 1:  # the choices before tokens were dropped
            best = router.gating(inputs[0]).reshape(-1, EXPERTS).argmax(-1)
            self.choices.append(best[here])
            wanted = torch.nn.functional.one_hot(best, EXPERTS).bool()
        else:
            wanted = map_
        layer = router.layer_number - 1
        self.wanted[layer] += wanted[here].sum(0)
        self.dropped[layer] += (wanted & ~map_)[here].sum()

    @contextmanager
    def with_capacity(self, factor: float | None) -> Iterator[None]:
        """Limit each expert, during the block, to `factor` times its even share of a
        rank's tokens in a micro-batch.
        """
        (config,) = {id(router.config): router.config for router in self.routers}.values()
        before = config.moe_expert_capacity_factor
        config.moe_expert_capacity_factor = factor
        yield
        config.moe_expert_capacity_factor = before

    def taken(self) -> dict[str, float]:
        """Return the counts of all ranks since the last call."""
        dist.all_reduce(self.wanted)
        dist.all_reduce(self.dropped)
        layers = self.wanted[self.wanted.sum(1) > 0]
        imbalance = layers.amax(1) / layers.mean(1)
        found = {
            "imbalance": float(imbalance.mean()),
            "imbalance_max": float(imbalance.max()),
            "unused": float((layers == 0).float().mean()),
            "dropped": float(self.dropped.sum() / self.wanted.sum()),
        }
        self.wanted.zero_()
        self.dropped.zero_()
        self.choices.clear()
        return found


def scored(
    trainer: Trainer, watched: Watched, held_out: list[TrainSequence], factor: float | None
) -> dict[str, Any]:
    """Return log-probs of the held-out traces' learnt tokens,
    and the routers' choices.
    """
    rollouts = tuple(
        ScoredRollout(s.tokens, int(np.flatnonzero(s.loss_weight)[0])) for s in held_out
    )
    with watched.with_capacity(factor):
        found = trainer.score(Score(version=0, rollouts=rollouts, against=0), "benchmark")
    choices = torch.cat(watched.choices) if watched.choices else None
    return {"logprobs": np.concatenate(found.logprobs), "choices": choices, **watched.taken()}


def gap(server: dict[str, Any], learner: dict[str, Any]) -> dict[str, float]:
    """Return how far a learner's log-probs and choices are from a server's. outside:
    share beyond DAPO's ratio bounds.
    """
    ratio = np.exp(learner["logprobs"] - server["logprobs"])
    size = np.abs(learner["logprobs"] - server["logprobs"])
    found = {
        "dropped": learner["dropped"],
        "loss": float(-learner["logprobs"].mean()),
        "gap": float(size.mean()),
        "gap_p99": float(np.quantile(size, 0.99)),
        "gap_max": float(size.max()),
        "outside": float(((ratio < 0.8) | (ratio > 1.28)).mean()),
    }
    if server["choices"] is not None:
        other = torch.tensor(
            [float((server["choices"] != learner["choices"]).sum()), float(len(server["choices"]))]
        )
        dist.all_reduce(other)
        found["routed_otherwise"] = float(other[0] / other[1])
    return found


def run(name: str, settings: dict[str, float], steps: int, folder: Path) -> dict[str, Any]:
    """Train one arm on all ranks, and measure it."""
    init = folder / name.partition("-")[0]
    capacity = settings.get("capacity")
    moe = {key: value for key, value in settings.items() if key != "capacity"}
    tree = {
        "model": {"path": str(init), "dtype": "fp32", "moe": moe, **LAYOUT},
        "resources": {"learner_ranks": RANKS},
        "learner": {"microbatch_tokens": TOKENS},
        "sft": {"init": str(init), "steps": steps, "optimizer": {"lr": 3e-3}},
    }
    recipe = recipes.from_tree(tree)
    parallel.start(recipe.model, 0, timeout_s=300)
    trainer = Trainer(recipe, init, supervised=True)
    watched = Watched(trainer)
    traces = load_traces(str(folder / "sft.jsonl"), load_tokenizer(init), recipe.data.decontaminate)
    held_out = next(batches(traces[:HELD_OUT], sum(len(t.tokens) for t in traces[:HELD_OUT]), 0))
    begun = time.monotonic()
    losses = []
    counted = []
    for step, batch in enumerate(islice(batches(traces[HELD_OUT:], TOKENS, 0), steps)):
        with watched.with_capacity(capacity):
            losses.append(trainer.train_step(batch)["loss"])
        if step in (19, steps - 21, steps - 1):
            counted.append(watched.taken())
    seconds = time.monotonic() - begun
    server = scored(trainer, watched, held_out, None)
    row = {
        "arm": name,
        **settings,
        "steps": steps,
        "seconds": seconds,
        "loss_trained": float(np.mean(losses[-20:])),
        "first_20_steps": counted[0],
        "last_20_steps": counted[-1],
        "loss": float(-server["logprobs"].mean()),
        "imbalance": server["imbalance"],
        "imbalance_max": server["imbalance_max"],
        "unused": server["unused"],
    }
    if name.startswith("scout"):
        row["learner"] = {
            str(c): gap(server, scored(trainer, watched, held_out, c)) for c in CAPACITIES
        }
    hf.save(trainer.policy.chunks, trainer.policy.family, init, folder / f"{name}-trained")
    model = AutoModelForCausalLM.from_pretrained(
        folder / f"{name}-trained", attn_implementation="eager"
    ).eval()
    firsts = [int(np.flatnonzero(s.loss_weight)[0]) for s in held_out]
    theirs = scores(model, [s.tokens for s in held_out])
    served = np.concatenate([each[first - 1 :] for each, first in zip(theirs, firsts, strict=True)])
    row["from_transformers"] = float(np.abs(served - server["logprobs"]).max())
    return row


def world(steps: int, folder: Path, out: Path, names: list[str]) -> None:
    """Be one rank: run all arms, and write a line of JSON for each."""
    for name in names:
        row = run(name, ARMS[name], steps, folder)
        if dist.get_rank() == 0:
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    parallel.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=list(ARMS), metavar="ARM")
    parser.add_argument("--out", type=Path, default=Path("runs/expert_balance.jsonl"))
    options = parser.parse_args()
    done = options.out.read_text().splitlines() if options.out.exists() else []
    left = [name for name in options.arms if name not in {json.loads(line)["arm"] for line in done}]
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), 0)
        for name, config in MODELS.items():
            save_model(Path(folder) / name, config, seed=0)
        arguments = ("world", str(options.steps), folder, str(options.out.resolve()), *left)
        run_world(
            RANKS, "benchmarks.expert_balance", *arguments, timeout_s=600 * len(left), fresh=True
        )
    print(options.out.read_text(), end="")


if __name__ == "__main__":
    if sys.argv[1:2] == ["world"]:
        world(int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]), sys.argv[5:])
    else:
        main()
