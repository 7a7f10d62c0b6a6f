"""The RL step is the same at every layout, packed or not: what transformers and
autograd compute from the paper's formulas.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoints_tools.convert import reshard
from checkpoints_tools.layout import Parallelism
from megarl.core.base.types import Batch, Group, Prompt, Rollout, Segment, encode
from tests.parallel.worlds import run_world
from tests.tiny import gradients, tiny_llama, tiny_llama4, tiny_qwen3_moe
from tests.unit.core.learner.test_expert_load import balancing_by_transformers

VOCABULARY = 131  # no TP divides it
TEMPERATURE = 0.7
CAP = 1.5  # as in learner_world.recipe_of


def segment(draw: np.random.Generator, length: int, trained: bool = True) -> Segment:
    logprobs = -draw.uniform(3.5, 6.5, length) if trained else np.zeros(length)
    tokens = draw.integers(0, VOCABULARY, length)
    return Segment(
        tokens=tokens.astype(np.int32),
        logprobs=logprobs.astype(np.float32),
        weight_version=0,
        trained=trained,
    )


def make_batch() -> Batch:
    """Four tickets of four rollouts: one without variance, one void; lengths from 6 to
    over a micro-batch; masked segments.
    """
    draw = np.random.default_rng(5)
    groups = []
    for ticket in range(4):
        tokens = draw.integers(0, VOCABULARY, 3 + 4 * ticket).astype(np.int32)
        rollouts = []
        for sample in range(4):
            right = bool(sample % 2) if ticket != 1 else True
            segments = [segment(draw, int(draw.integers(3, 30)))]
            if sample == 2:  # interrupted
                segments += [segment(draw, 4, trained=False), segment(draw, 5)]
            if ticket == 2 and sample == 3:
                segments.append(segment(draw, 60))
            reward = 1.0 if right else -1.0
            rollouts.append(
                Rollout(
                    sample=sample,
                    segments=tuple(segments),
                    reward=reward,
                    correct=right,
                    finish="stop",
                )
            )
        prompt = Prompt(id=str(ticket), tokens=tokens, answer="")
        groups.append(Group(ticket=ticket, prompt=prompt, rollouts=tuple(rollouts)))
    prompt = Prompt(id="void", tokens=np.array([1], np.int32), answer="")
    return Batch(
        step=0, groups=(*groups, Group(ticket=4, prompt=prompt, rollouts=(), void="no server"))
    )


def scalerl_by_transformers(model: Any, batch: Batch, path: Path) -> dict[str, Any]:
    """The loss of ScaleRL in float64, rollout by rollout, from the formulas of arXiv
    2510.13786, section 3.
    """
    model = model.double()
    groups = [g for g in batch.groups if len({r.reward for r in g.rollouts}) > 1]
    centred = {
        g.ticket: [
            r.reward - sum(q.reward for q in g.rollouts) / len(g.rollouts) for r in g.rollouts
        ]
        for g in groups
    }
    deviation = float(np.std([c for values in centred.values() for c in values]))
    loss = torch.zeros((), dtype=torch.float64)
    magnitude = 0.0
    entropies = []
    surprises = []
    ratios = []
    sequences = []
    logprobs = []
    routed: dict[int, torch.Tensor] = {}
    for group in groups:
        tokens_of_group = sum(r.trained_tokens for r in group.rollouts)
        for rollout, centre in zip(group.rollouts, centred[group.ticket], strict=True):
            ids = torch.from_numpy(np.concatenate([group.prompt.tokens, rollout.tokens])).long()
            first = len(group.prompt.tokens)
            with counted_experts(model, routed):
                logits = model(ids[None]).logits[0, first - 1 : -1]
            distribution = torch.log_softmax(logits / TEMPERATURE, -1)
            logp = distribution.gather(-1, ids[first:, None])[:, 0]
            trained = torch.from_numpy(rollout.trained)
            ratio = (logp.detach() - torch.from_numpy(rollout.logprobs).double()).exp()
            terms = -ratio.clamp(max=CAP) * (centre / deviation) * logp
            loss = loss + terms[trained].sum() / tokens_of_group / len(groups)
            magnitude += float(terms[trained].abs().sum()) / tokens_of_group / len(groups)
            surprises.append(-logp.detach()[trained])
            entropies.append(-(distribution.exp() * distribution).sum(-1).detach()[trained])
            ratios.append(ratio[trained])
            sequences.append(ids.numpy().astype(np.int32))
            whole = torch.log_softmax(model(ids[None]).logits[0, :-1].detach(), -1)
            logprobs.append(whole.gather(-1, ids[1:, None])[:, 0].numpy())
    loss.backward()
    ratio = torch.cat(ratios)
    return {
        "loss": float(loss),
        "magnitude": magnitude,  # terms of both signs cancel
        "gradients": gradients(model, path),
        "imbalance": {
            f"expert_imbalance_layer_{layer}": float(tokens.max() / tokens.mean())
            for layer, tokens in routed.items()
        },
        "unused": float(
            np.mean([(tokens == 0).double().mean() for tokens in routed.values()] or [0.0])
        ),
        "entropy": float(torch.cat(entropies).mean()),
        "surprise": float(torch.cat(surprises).mean()),
        "ratio_max": float(ratio.max()),
        "capped_share": float((ratio >= CAP).double().mean()),
        "tokens_trained": float(len(ratio)),
        "sequences": sequences,
        "logprobs": logprobs,
    }


@contextmanager
def counted_experts(model: Any, routed: dict[int, torch.Tensor]) -> Iterator[None]:
    """Adds to `routed` how many tokens transformers' routers give each expert, by
    layer.
    """

    def count(layer: int, router: Any, inputs: tuple[torch.Tensor]) -> None:
        chosen = (inputs[0].flatten(0, -2) @ router.weight.T).topk(router.top_k, -1).indices
        counts = torch.bincount(chosen.flatten(), minlength=router.num_experts).double()
        routed[layer] = routed.get(layer, 0) + counts

    hooks = []
    for name, module in model.named_modules():
        if name.endswith((".mlp.gate", ".feed_forward.router")):
            hooks.append(module.register_forward_pre_hook(partial(count, int(name.split(".")[2]))))
    yield
    for hook in hooks:
        hook.remove()


MODELS: dict[str, Callable[..., Any]] = {
    "llama": partial(tiny_llama, num_hidden_layers=8),
    "qwen3_moe": partial(tiny_qwen3_moe, mlp_only_layers=[1]),
    "llama4": tiny_llama4,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("learner")
    batch = make_batch()
    (path / "batch.msgpack").write_bytes(encode(batch))
    for name, tiny in MODELS.items():
        model = tiny(path / name / "model", vocab_size=VOCABULARY)
        torch.save(
            scalerl_by_transformers(model, batch, tmp_path_factory.mktemp(name)),
            path / name / "expected.pt",
        )
    draw = np.random.default_rng(6)
    ids = [
        draw.integers(0, VOCABULARY, n).astype(np.int32) for n in (40, 33, 57, 64)
    ]  # each fills a micro-batch
    again = MODELS["qwen3_moe"](tmp_path_factory.mktemp("again") / "model", vocab_size=VOCABULARY)
    balancing = balancing_by_transformers(again, ids, tmp_path_factory.mktemp("balancing"))
    torch.save({"ids": ids, "gradients": balancing}, path / "qwen3_moe" / "balancing.pt")
    print(run_world(1, "tests.parallel.learner_world", str(path)))
    # The other worlds resume from one rank's checkpoint as checkpoints_tools reshards
    # it, optimiser included.
    for name, layout in {
        "llama": Parallelism(tensor=2, pipeline=2),
        "llama4": Parallelism(pipeline=2, expert=2),
    }.items():
        (step,) = (path / name / "checkpoints" / "one_rank").iterdir()
        reshard(step, path / name / "resharded", layout)
        shutil.rmtree(step)
        (path / name / "resharded").rename(step)
    return path


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_every_layout_takes_the_same_step(directory: Path, ranks: int) -> None:
    print(run_world(ranks, "tests.parallel.learner_world", str(directory)))
