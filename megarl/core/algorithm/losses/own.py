"""A user's own loss: `loss.kind: package.module:function` (docs/add-a-loss.md).

    function(tokens: Tokens, settings: recipe.loss) ─► (losses [n], metrics {name: [n]})

It is tried on a made-up micro-batch when it is loaded, so what it returns is known before training starts. So are the names
of its metrics, which ranks that do not compute the loss reduce too. Metrics of the importance ratio are added.
"""

import importlib
import os
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from megarl.core.algorithm.losses import terms
from megarl.core.algorithm.losses.terms import TokenLoss, Tokens
from megarl.core.base.errors import MegarlError
from megarl.core.recipe import Loss
from megarl.core.telemetry.names import NAMES

OwnLoss = Callable[[Tokens, Loss], tuple[Tensor, dict[str, Tensor]]]


def own(section: Loss) -> tuple[TokenLoss, tuple[str, ...]]:
    """Return the loss and its metrics' names. MegarlError if it cannot be imported or called, or returns something else."""
    function = _imported(section.kind)
    tried = made_up()
    try:
        returned = function(tried, section)
    except Exception as error:  # a user's function may raise anything
        raise _refused(section.kind, f"fails on three made-up tokens: {type(error).__name__}: {error}") from None
    names = _metrics(section.kind, returned, tried)

    def loss(tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        losses, metrics = function(tokens, section)
        return losses, terms.ratio_metrics(tokens.logp.detach() - tokens.behaviour) | metrics

    return loss, (*terms.RATIO_METRICS, *names)


def made_up() -> Tokens:
    """Make three tokens of two sequences."""
    logp = torch.tensor([-0.5, -1.0, -2.0], requires_grad=True)
    return Tokens(
        logp=logp,
        behaviour=torch.tensor([-0.6, -0.9, -2.5]),
        reference=torch.tensor([-0.7, -0.8, -2.2]),
        advantage=torch.tensor([1.0, 1.0, -1.0]),
        entropy=logp * -0.5,
        counted=torch.ones(3),
        here=torch.tensor([2, 1]),
        lengths=torch.tensor([2.0, 1.0]),
    )


def _imported(kind: str) -> OwnLoss:
    module, _, name = kind.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        function: OwnLoss = getattr(importlib.import_module(module), name)
    except Exception as error:  # importing may do anything
        raise _refused(
            kind,
            f"cannot be imported: {type(error).__name__}: {error} (looked for on PYTHONPATH and in {os.getcwd()})",
        ) from None
    if not callable(function):
        raise _refused(kind, f"is a {type(function).__name__} and cannot be called")
    return function


def _metrics(kind: str, returned: object, tried: Tokens) -> tuple[str, ...]:
    """Return the metrics' names after checking that `returned` is what a loss must return."""
    n = len(tried.logp)
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict)):
        raise _refused(kind, f"returns a {type(returned).__name__}, not (losses, metrics)")
    losses, metrics = returned
    if not isinstance(losses, Tensor) or losses.shape != (n,):
        shape = (
            f"of shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else f"which are a {type(losses).__name__}"
        )
        raise _refused(kind, f"returns losses {shape}; one a token is needed, [n], not their sum or mean")
    if not losses.requires_grad:
        raise _refused(
            kind, "returns losses without a gradient; they must depend on tokens.logp (or entropy) undetached"
        )
    for name, values in metrics.items():
        if not isinstance(values, Tensor) or values.shape != (n,) or values.requires_grad:
            raise _refused(kind, f"returns a metric {name!r} that is no tensor [n] without gradient; use .detach()")
        if name in NAMES or name in terms.RATIO_METRICS:
            raise _refused(kind, f"returns a metric {name!r}, a name that is taken; choose another")
    return tuple(metrics)


def _refused(kind: str, why: str) -> MegarlError:
    return MegarlError(f"loss.kind: {kind} {why}; see docs/add-a-loss.md")
