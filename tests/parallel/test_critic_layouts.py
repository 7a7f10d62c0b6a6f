"""Values of the critic, GAE, and the gradients of critic and policy are the same at
every layout: those of transformers' hidden states times the head, of the formulas and
of autograd, in float64 and a sequence at a time.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.core.base.types import Batch, encode
from tests.parallel.critic_world import GAMMA, LAMBDA
from tests.parallel.test_learner_layouts import VOCABULARY, make_batch
from tests.parallel.worlds import run_world
from tests.tiny import gradients, tiny_llama


def by_transformers(model: Any, batch: Batch, path: Path) -> dict[str, Any]:
    """A token's value is predicted from the hidden state before it; the gradient of
    REINFORCE with normalised GAE.
    """
    model = model.double()
    head = torch.from_numpy(np.random.default_rng(1).normal(0, 0.05, (1, model.config.hidden_size)))
    head = head.float().double().requires_grad_()
    rollouts = [(g, r) for g in batch.groups for r in g.rollouts]
    tokens = sum(int(r.trained.sum()) for _, r in rollouts)
    values = []
    logprobs = []
    raw = []
    for group, rollout in rollouts:
        ids = torch.from_numpy(np.concatenate([group.prompt.tokens, rollout.tokens])).long()
        first = len(group.prompt.tokens)
        trained = torch.from_numpy(rollout.trained)
        hidden = model.model(ids[None]).last_hidden_state[0, first - 1 : -1]
        values.append((hidden @ head.T)[:, 0][trained])
        distribution = torch.log_softmax(model.lm_head(hidden), -1)
        logprobs.append(distribution.gather(-1, ids[first:, None])[:, 0][trained])
        v = values[-1].detach().numpy()
        n = len(v)
        deltas = [(rollout.reward if t + 1 == n else GAMMA * v[t + 1]) - v[t] for t in range(n)]
        raw.append(
            np.array(
                [
                    sum((GAMMA * LAMBDA) ** (u - t) * deltas[u] for u in range(t, n))
                    for t in range(n)
                ]
            )
        )
    flat = np.concatenate(raw)
    advantages = [(a - flat.mean()) / flat.std() for a in raw]
    returns = [a + v.detach().numpy() for a, v in zip(raw, values, strict=True)]
    errors = [v - torch.from_numpy(r) for v, r in zip(values, returns, strict=True)]
    value_loss = torch.cat(errors).square().sum() / 2 / tokens
    policy_loss = -torch.cat(logprobs) @ torch.from_numpy(np.concatenate(advantages)) / tokens
    model.zero_grad()
    policy_loss.backward(retain_graph=True)
    of_policy = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    value_loss.backward()
    critic = gradients(
        model, path
    )  # writes into the parameters: what the graph needs of them is gone
    assert head.grad is not None
    critic["head"] = head.grad
    del critic["lm_head.weight"]
    for parameter, gradient in zip(model.parameters(), of_policy, strict=True):
        parameter.grad = gradient
    everything = torch.cat(values).detach().numpy()
    targets = np.concatenate(returns)
    return {
        "head": head.detach().float(),
        "values": [v.detach().numpy() for v in values],
        "advantages": advantages,
        "critic": critic,
        "policy": gradients(model, path),
        "metrics": {
            "value_loss": float(value_loss),
            "value_mean": everything.mean(),
            "return_mean": targets.mean(),
            "explained_variance": 1 - (targets - everything).var() / targets.var(),
            "tokens_trained": float(tokens),
        },
    }


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("critic")
    batch = make_batch()
    (path / "batch.msgpack").write_bytes(encode(batch))
    model = tiny_llama(path / "model", vocab_size=VOCABULARY)
    torch.save(
        by_transformers(model, batch, tmp_path_factory.mktemp("gradients")), path / "expected.pt"
    )
    return path


def test_every_layout_has_the_values_and_gradients_of_the_formulas(directory: Path) -> None:
    print(run_world(2, "tests.parallel.critic_world", str(directory)))
