"""The gated delta networks of Qwen3.5 and Qwen3-Next, read from config.json: their
sizes, which layers have one, and what follows from these numbers alone.

    hidden ─► q, k, v ─► causal convolution, silu ─► delta rule ─► norm x gate ─► out
              gate, decay, rate of writing ────────────┘

Such a layer has no keys and values. It has one matrix per value head and sequence, its
state, which each token changes (arXiv 2412.06464).
"""

from dataclasses import dataclass

from megarl.core.base.config_values import size
from megarl.core.base.errors import MegarlError
from megarl.core.base.types import JsonObject

FULL = "full_attention"
DELTA = "linear_attention"
CHUNK = 64
"""Tokens that the delta rule computes together (models/delta.py)."""


@dataclass(frozen=True)
class DeltaLayers:
    """Gated delta networks in all layers but every `interval`-th. Each key head serves
    value_heads / key_heads value heads.
    """

    layers: tuple[int, ...]
    interval: int
    key_heads: int  # of q, too
    value_heads: int
    key_dim: int  # width of a head of q and of k
    value_dim: int  # width of a head of v, and of its gate
    taps: int  # tokens that the convolution of q, k and v sees, the token's own included

    @property
    def key(self) -> int:
        """Width of k, all heads together; of q, too."""
        return self.key_heads * self.key_dim

    @property
    def value(self) -> int:
        """Width of v, all heads together; of the gate, too."""
        return self.value_heads * self.value_dim

    @property
    def convolved(self) -> int:
        """Width of q, k and v together: the channels of the convolution."""
        return 2 * self.key + self.value

    @property
    def grouped(self) -> int:
        """Value heads that one key head serves."""
        return self.value_heads // self.key_heads

    def matrix_parameters(self, hidden: int) -> int:
        """Return the parameters of the matrices of one layer: to q, k, v and gate, to
        the two numbers of each value head, and back to `hidden`.
        """
        inputs = self.convolved + self.value + 2 * self.value_heads
        return hidden * (inputs + self.value)

    @property
    def vector_parameters(self) -> int:
        """Parameters of one layer besides its matrices: of the convolution, A_log,
        dt_bias and the norm.
        """
        return self.taps * self.convolved + 2 * self.value_heads + self.value_dim

    @property
    def rule_flops(self) -> int:
        """Floating-point operations of the delta rule per token and layer in a forward
        pass, in chunks of CHUNK tokens: products within a chunk (k with k, q with k,
        and what they weight) and three with the state.
        """
        within = 4 * CHUNK * (self.key_dim + self.value_dim)
        with_state = 6 * self.key_dim * self.value_dim
        return self.value_heads * (within + with_state)

    def state_bytes(self, width: int) -> int:
        """Return what a server keeps of one sequence in all layers together: the
        states, in FP32, and the inputs of the convolution that the next token needs, of
        `width` bytes each. However long the sequence is.
        """
        states = 4 * self.value_heads * self.key_dim * self.value_dim
        inputs = width * (self.taps - 1) * self.convolved
        return len(self.layers) * (states + inputs)


def read_delta_layers(config: JsonObject) -> DeltaLayers:
    """Return the delta networks that a text model's config.json describes."""
    layers = size(config, "num_hidden_layers")
    interval = _interval(config, layers)
    key_heads = size(config, "linear_num_key_heads")
    value_heads = size(config, "linear_num_value_heads")
    if value_heads % key_heads:
        raise MegarlError(
            f"linear_num_value_heads={value_heads} is no multiple of"
            f" linear_num_key_heads={key_heads}"
        )
    return DeltaLayers(
        layers=tuple(i for i in range(layers) if (i + 1) % interval),
        interval=interval,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=size(config, "linear_key_head_dim"),
        value_dim=size(config, "linear_value_head_dim"),
        taps=size(config, "linear_conv_kernel_dim", 4),
    )


def _interval(config: JsonObject, layers: int) -> int:
    """Return n if every n-th layer has attention. transformers follows layer_types, and
    SGLang full_attention_interval, so both must say the same where there are both.
    """
    kinds = config.get("layer_types")
    if kinds is None:
        return size(config, "full_attention_interval", 4)
    interval = 0
    if FULL in kinds:
        interval = size(config, "full_attention_interval", kinds.index(FULL) + 1)
    expected = [DELTA if interval and (i + 1) % interval else FULL for i in range(layers)]
    if kinds != expected:
        raise MegarlError(
            "layer_types is not supported: SGLang places attention in every"
            " full_attention_interval-th layer and in no others; make both say the same"
        )
    return interval
