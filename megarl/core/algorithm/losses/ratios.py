"""What every policy loss says of rho_t = pi(y_t) / mu(y_t), the importance ratio of each trained token.

k3 = rho - 1 - log rho estimates KL(mu || pi) on tokens of mu (http://joschu.net/blog/kl-approx.html).
The effective sample size, as a share of the tokens, is (sum rho)^2 / (n sum rho^2): 1 where all weigh the same, 1/n where one
outweighs all others (Kong 1992).
"""

from torch import Tensor

RATIO_METRICS = (
    "ratio_mean", "ratio_max", "ratio_square", "kl_k3", "trained_logprob_diff", "trained_logprob_diff_max",
)  # fmt: skip


def ratio_metrics(log_ratio: Tensor) -> dict[str, Tensor]:
    """Of log rho [n], without gradient."""
    ratio, gap = log_ratio.exp(), log_ratio.abs()
    return {
        "ratio_mean": ratio,
        "ratio_max": ratio,
        "ratio_square": ratio.square(),
        "kl_k3": ratio - 1 - log_ratio,
        "trained_logprob_diff": gap,
        "trained_logprob_diff_max": gap,
    }


def with_effective_sample_size(means: dict[str, float]) -> dict[str, float]:
    """Reduced metrics, `effective_sample_size` in place of the mean square that it comes from."""
    others = {name: value for name, value in means.items() if name != "ratio_square"}
    return others | {"effective_sample_size": means["ratio_mean"] ** 2 / means["ratio_square"]}
