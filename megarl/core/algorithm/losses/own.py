"""A user's own loss: `loss.kind: package.module:function` (docs/how-to/add-a-loss.md).

    function(tokens: Tokens, settings: recipe.loss) ─► (losses [n], metrics {name: [n]})

It is tried on made-up tokens when it is loaded, so a mistake is reported before
training starts.
"""

import os

from torch import Tensor

from megarl.core.algorithm.losses.terms import PolicyLoss, Tokens, made_up_tokens, ratio_metrics
from megarl.core.base.errors import MegarlError
from megarl.core.base.process import imported
from megarl.core.recipe import Loss
from megarl.core.telemetry.names import NAMES


def load_loss(section: Loss) -> PolicyLoss:
    """Return the loss that `section.kind` names, or raise a MegarlError that says what
    is wrong with it.
    """
    tokens = made_up_tokens()
    try:
        function = imported(section.kind)
    except Exception as error:  # importing may do anything
        reason = (
            f"cannot be imported: {type(error).__name__}: {error} (looked for on PYTHONPATH and in"
            f" {os.getcwd()})"
        )
        raise _refused(section.kind, reason) from None
    if not callable(function):
        raise _refused(section.kind, f"is a {type(function).__name__} and cannot be called")
    try:
        returned = function(tokens, section)
    except Exception as error:  # a user's function may raise anything
        reason = f"fails on three made-up tokens: {type(error).__name__}: {error}"
        raise _refused(section.kind, reason) from None
    if mistake := _mistake(returned, tokens):
        raise _refused(section.kind, f"returns {mistake}")
    return function


def _mistake(returned: object, tokens: Tokens) -> str:
    """Return the first fault of a loss's result for these tokens; empty if none."""
    not_a_pair = f"a {type(returned).__name__}, not (losses, metrics)"
    if not isinstance(returned, tuple) or len(returned) != 2:
        return not_a_pair
    losses, metrics = returned
    if not isinstance(metrics, dict):
        return not_a_pair
    return _mistake_in_losses(losses, tokens) or _mistake_in_metrics(metrics, tokens)


def _mistake_in_losses(losses: object, tokens: Tokens) -> str:
    """Return the first fault of a result's losses for these tokens; empty if none."""
    if not isinstance(losses, Tensor):
        return (
            f"losses that are a {type(losses).__name__}, not a tensor [n] with one loss per token"
        )
    if losses.shape != tokens.logp.shape:
        return (
            f"losses of shape {tuple(losses.shape)}; return one loss per token, [n], not their sum"
            " or mean"
        )
    if not losses.requires_grad:
        return (
            "losses without a gradient; they must depend on tokens.logp or tokens.entropy without"
            " .detach()"
        )
    return ""


def _mistake_in_metrics(metrics: dict[str, object], tokens: Tokens) -> str:
    """Return the first fault of a result's metrics for these tokens; empty if none."""
    shape = tokens.logp.shape
    for name, values in metrics.items():
        if not isinstance(values, Tensor) or values.shape != shape or values.requires_grad:
            return f"a metric {name!r} that is not a tensor [n], or has a gradient; use .detach()"
        if name in NAMES or name in ratio_metrics(tokens):
            return f"a metric named {name!r}, but that name is taken; choose another"
    return ""


def _refused(kind: str, reason: str) -> MegarlError:
    """Return the error of a loss that cannot be used. reason: the rest of a sentence
    that begins with the loss's name.
    """
    return MegarlError(f"loss.kind: {kind} {reason}; see docs/how-to/add-a-loss.md")
