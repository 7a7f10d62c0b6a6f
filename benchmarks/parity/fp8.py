"""Compares a real model in bf16 with the same model as servers in FP8 would compute it,
by a stand-in in plain torch.

    python -m benchmarks.parity.fp8 real DIR gathered.jsonl --fp8 weights
    python -m benchmarks.parity.fp8 real DIR gathered.jsonl --fp8 both
    python -m benchmarks.parity.records keep gathered.jsonl kept.csv.gz --dtype fp8
    python -m benchmarks.parity.records limits kept.csv.gz --dtype fp8
    python -m benchmarks.parity.fp8 experts

transformers' model plays both sides. For the server, parts are replaced: with `weights`
(serving.quantization: fp8) the linear maps, by block-quantised weights and activations
that are quantised as they come (tests/fp8_stand_in.py); with `cache`
(serving.kv_cache_dtype: fp8_e4m3) attention, by that of FlashAttention 3 on q, k and v
in e4m3 with a scale of 1. The server samples, with a cache; then both sides score its
answers. SGLang need not be able to divide the model's shapes into blocks. `experts`
compares a random Qwen3-MoE of 16 layers in the same way, on random tokens; nothing is
sampled.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Linear, Module
from torch.nn.functional import silu
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeTopKRouter

from benchmarks.parity.models import LOGIT_SPREAD
from benchmarks.parity.real import (
    ANSWER_TOKENS,
    ESSAY_EVERY,
    ESSAY_TOKENS,
    ESSAYS,
    PerturbedWeights,
)
from benchmarks.parity.records import STATES_OF_A_SEED, ComparedRollout
from megarl.core.base.messages import PARITY_ROLLOUTS
from megarl.core.base.terminal import say
from megarl.core.sync.block_fp8 import VALUES, dequantise, is_quantised, quantise
from tests.fp8_stand_in import product, rounded_activations

PARTS = ("both", "weights", "cache")
"""What is in FP8; states of the second begin at STATES_OF_A_SEED."""
ATTENTION = "fp8_stand_in"
PROBABILITY_SCALE = 256.0
"""FlashAttention 3 multiplies probabilities by this before it rounds them to e4m3
(Max_offset = 8 in its hopper/softmax.h).
"""


def e4m3(tensor: Tensor) -> Tensor:
    """Return the tensor rounded to FP8, in FP32;
    numbers beyond the largest become it.
    """
    largest = torch.finfo(VALUES).max
    return tensor.float().clamp(-largest, largest).to(VALUES).float()


def attend(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend in FP8; query [batch, heads, new, width], key and value [batch, groups,
    held, width]. Causal.
    """
    shared = query.shape[1] // key.shape[1]
    keys = e4m3(key).repeat_interleave(shared, 1)
    values = e4m3(value).repeat_interleave(shared, 1)
    scores = e4m3(query) @ keys.transpose(-1, -2) * scaling
    new, held = scores.shape[-2:]
    later = torch.ones(new, held, dtype=torch.bool).triu(held - new + 1)
    scores = scores.masked_fill(later, -torch.inf)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    rounded = e4m3(weights * PROBABILITY_SCALE) / PROBABILITY_SCALE
    attended = rounded @ values / weights.sum(-1, keepdim=True)
    return attended.to(query.dtype).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, attend)


@contextmanager
def as_served(model: Any, weights: bool, cache: bool) -> Iterator[None]:
    """Compute like a server in FP8 within this context."""
    with ExitStack() as undo:
        if weights:
            for name, module in model.named_modules():
                if isinstance(module, Linear) and is_quantised(f"{name}.weight"):
                    served = dequantise(*quantise(module.weight.detach()))
                    undo.callback(setattr, module, "forward", module.forward)
                    module.forward = partial(multiply, module, served)  # type: ignore[method-assign]
                elif isinstance(module, Qwen3MoeExperts):
                    undo.callback(setattr, module, "forward", module.forward)
                    module.forward = partial(multiply_experts, module)  # type: ignore[method-assign]
        if cache:
            undo.callback(model.set_attn_implementation, model.config._attn_implementation)
            model.set_attn_implementation(ATTENTION)
        yield


def multiply(module: Linear, weight: Tensor, x: Tensor) -> Tensor:
    out = (rounded_activations(x) @ weight.T).to(x.dtype)
    return out if module.bias is None else out + module.bias


def multiply_experts(
    module: Qwen3MoeExperts, hidden: Tensor, chosen: Tensor, weights: Tensor
) -> Tensor:
    """Return the experts' output [tokens, hidden]; chosen, weights [tokens, experts of
    a token].
    """
    out = torch.zeros_like(hidden, dtype=torch.float32)
    for expert in chosen.unique().tolist():
        tokens, places = (chosen == expert).nonzero(as_tuple=True)
        halves = [
            product(hidden[tokens], *quantise(half))
            for half in module.gate_up_proj[expert].detach().chunk(2)
        ]
        inner = silu(halves[0]) * halves[1]
        down = product(inner, *quantise(module.down_proj[expert].detach()))
        out.index_add_(0, tokens, down.float() * weights[tokens, places, None].float())
    return out.to(hidden.dtype)


def logits_of(model: Any, hidden: Tensor) -> Tensor:
    """Return FP32 logits of the last hidden states:
    the head is in FP32 on both sides.
    """
    return hidden.float() @ model.lm_head.weight.float().T


def scores(model: Any, sequences: Tensor, first: int) -> np.ndarray:
    """Return log-probs [rollouts, completion] of the tokens from `first` on; sequences
    [rollouts, length].
    """
    hidden = model.model(sequences).last_hidden_state[:, first - 1 : -1]
    logprobs = torch.log_softmax(logits_of(model, hidden), -1)
    return logprobs.gather(-1, sequences[:, first:, None])[..., 0].numpy()


def sampled(model: Any, prompts: Tensor, tokens: int) -> tuple[Tensor, np.ndarray]:
    """Sample so many tokens after each prompt [rollouts, length], with a cache; return
    the sequences and the log-probs.
    """
    out = model.model(prompts, use_cache=True)
    sequences = prompts
    found = []
    for _ in range(tokens):
        logprobs = torch.log_softmax(logits_of(model, out.last_hidden_state[:, -1]), -1)
        chosen = torch.multinomial(logprobs.exp(), 1)
        found.append(logprobs.gather(-1, chosen))
        sequences = torch.cat([sequences, chosen], 1)
        out = model.model(chosen, use_cache=True, past_key_values=out.past_key_values)
    return sequences, torch.cat(found, 1).numpy()


class EqualPrompts:
    """Prompts of one length, in the model's chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        self._tokenizer = tokenizer
        self._random = np.random.default_rng(seed)

    def sums(self, count: int) -> Tensor:
        numbers = self._random.integers(10, 21, (count, 2))
        return self._chats(
            "Reply with a number.", [f"What is {first} + {second}?" for first, second in numbers]
        )

    def essays(self, count: int) -> Tensor:
        return self._chats(
            "You are a helpful assistant.", [str(self._random.choice(ESSAYS))] * count
        )

    def _chats(self, system: str, questions: Sequence[str]) -> Tensor:
        rows = []
        for question in questions:
            messages = [
                {"role": "system", "content": system},
                {"role": "user", "content": question},
            ]
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            rows.append(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        return torch.tensor(rows)


@torch.no_grad()
def gather(options: argparse.Namespace) -> None:
    """Write a line of JSON for each rollout that both sides have scored."""
    torch.manual_seed(options.seed)
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.bfloat16, attn_implementation="eager"
    )
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    prompts = EqualPrompts(tokenizer, options.seed)
    perturbed = PerturbedWeights([p for _, p in model.named_parameters()], options.seed)
    fp8 = {"weights": options.fp8 != "cache", "cache": options.fp8 != "weights"}
    with options.gathered.open("a") as file:
        for state in range(options.states):
            kind = perturbed.change(state, options.rate)
            essay = state % options.essay_every == options.essay_every - 1
            asked = prompts.essays(options.rollouts) if essay else prompts.sums(options.rollouts)
            first = asked.shape[1]
            with as_served(model, **fp8):
                sequences, behaviour = sampled(
                    model, asked, ESSAY_TOKENS if essay else ANSWER_TOKENS
                )
                served = scores(model, sequences, first)
            learner = scores(model, sequences, first)
            name = f"{options.fp8}-{kind}-essay" if essay else f"{options.fp8}-{kind}"
            number = STATES_OF_A_SEED * PARTS.index(options.fp8) + state
            for row, tokens in enumerate(sequences[:, first:].tolist()):
                ends = (
                    tokens.index(tokenizer.eos_token_id) + 1
                    if tokenizer.eos_token_id in tokens
                    else len(tokens)
                )
                given = (
                    values[row, :ends].tolist() for values in (behaviour, served, served, learner)
                )
                unknown = [float("nan")] * ends
                rollout = ComparedRollout(number, name, "", first, *given, unknown, unknown)
                file.write(json.dumps(asdict(rollout)) + "\n")
            off = np.abs(served - learner).mean()
            decode = np.abs(served - behaviour).mean()
            say(f"state {state} ({name}): kernels {off:.3g}, decode {decode:.3g}", flush=True)


EXPERTS = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_experts": 32,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
}
TOKENS = 64


@torch.no_grad()
def experts(options: argparse.Namespace) -> None:
    """Print, for several comparisons of four sequences, how log-probs and choices of
    experts differ.
    """
    torch.manual_seed(options.seed)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**EXPERTS, attn_implementation="eager", experts_implementation="eager")
    )
    model.lm_head.weight.normal_(0, LOGIT_SPREAD / EXPERTS["hidden_size"] ** 0.5)  # type: ignore[operator]
    model = model.bfloat16().eval()
    choices: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, Qwen3MoeTopKRouter):
            module.register_forward_hook(
                lambda _, inputs, out: choices.append(out[2].sort(-1).values)
            )
    found = []
    for _ in range(options.comparisons):
        tokens = torch.randint(EXPERTS["vocab_size"], (PARITY_ROLLOUTS, TOKENS))  # type: ignore[arg-type]
        with as_served(model, weights=options.fp8 != "cache", cache=options.fp8 != "weights"):
            served = scores(model, tokens, 1)
        by_server = torch.stack(choices)
        choices.clear()
        learner = scores(model, tokens, 1)
        by_learner = torch.stack(choices)
        choices.clear()
        apart = np.abs(served - learner)
        differing = (by_server != by_learner).any(-1).float().mean().item()
        found.append((apart.mean(), np.median(apart), differing))
    means, medians, shares = np.array(found).T
    say(f"{options.fp8}: {len(found)} comparisons of {apart.size} tokens")
    for name, values in (("mean", means), ("median", medians), ("choices that differ", shares)):
        say(f"  {name}: {values.mean():.3g}, largest {values.max():.3g}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    real = commands.add_parser("real")
    real.add_argument("model", type=Path)
    real.add_argument("gathered", type=Path)
    real.add_argument("--states", type=int, default=10)
    real.add_argument("--rollouts", type=int, default=32)
    real.add_argument("--essay-every", type=int, default=ESSAY_EVERY)
    real.add_argument("--rate", type=float, default=2e-5, help="how far a step moves a weight")
    real.set_defaults(run=gather)
    random = commands.add_parser("experts")
    random.add_argument("--comparisons", type=int, default=10)
    random.set_defaults(run=experts)
    for command in (real, random):
        command.add_argument("--fp8", choices=PARTS, default="both")
        command.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
