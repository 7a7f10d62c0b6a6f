"""The workload that both sides of the comparison run: a Llama of 3.3M parameters, 128
completions per step.

The policy is noise with a fixed chance of ending at every token, so lengths vary as in
reinforcement learning (geometric, cut off at a cap), and only speed is measured. Both
sides get the same model directory, prompts and lengths.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 1024
EOS = 2


@dataclass(frozen=True)
class GrpoStepSizes:
    """The sizes of one optimiser step. If `mean_tokens` is None, every completion runs
    to `max_tokens`.
    """

    prompts: int = 16
    generations: int = 8
    prompt_tokens: int = 12
    mean_tokens: int | None = 80
    max_tokens: int = 256
    steps: int = 10
    warmup_steps: int = 2

    @property
    def completions(self) -> int:
        return self.prompts * self.generations


def make_model(path: Path, work: GrpoStepSizes) -> None:
    """Write an fp32 Llama with 4 layers of width 256 and the words w4 … w1023 as
    tokens, which ends with probability 1/mean_tokens at each token.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=0,
        tie_word_embeddings=False,
        dtype="float32",
    )
    model = LlamaForCausalLM(config).float()
    _set_end_probability(model, 1 / work.mean_tokens if work.mean_tokens else 1e-9)
    model.save_pretrained(path)
    words = {"<pad>": 0, "<s>": 1, "</s>": EOS, "<unk>": 3} | {
        f"w{i}": i for i in range(4, VOCABULARY)
    }
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
    ).save_pretrained(path)


@torch.no_grad()
def _set_end_probability(model: LlamaForCausalLM, probability: float) -> None:
    """Set the probability of the end token. Residual dimension 0 is made a constant 1,
    to which no layer writes, so that the head can give one token a bias.
    """
    model.model.embed_tokens.weight[:, 0] = 1.0
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0
        layer.mlp.down_proj.weight[0] = 0
    model.lm_head.weight[:, 0] = 0
    hidden = model.model(torch.randint(4, VOCABULARY, (4, 64))).last_hidden_state
    model.lm_head.weight[EOS, 0] = math.log(VOCABULARY * probability) / hidden[..., 0].mean()


def prompt_texts(work: GrpoStepSizes, count: int) -> list[str]:
    """Return `count` different prompts with the same number of tokens."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, VOCABULARY, (count, work.prompt_tokens), generator=generator)
    return [" ".join(f"w{i}" for i in row) for row in ids.tolist()]
