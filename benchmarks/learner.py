"""Measures tokens/s of the learner's step alone, against a plain transformers step on
the same batch, in the same run.

    python -m benchmarks.learner [--threads 1] [--steps 5] [--microbatch-tokens 4096]
    [--fixed] [--json]

Both train the workload's Llama on the same completions: CISPO, gradient clip, AdamW.
The plain step pads a batch to its longest sequence, in micro-batches of the same number
of padded tokens, and computes the head's logits only for completions, as trainers do.
Steps alternate, so that other load on the machine affects both. Only real tokens count,
those of prompt and completion.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaForCausalLM

from benchmarks.workload import VOCABULARY, GrpoStepSizes, make_model
from megarl.core import recipe as recipes
from megarl.core.algorithm.batch import TrainSequence
from megarl.core.learner.trainer import Trainer
from megarl.core.models import parallel

CAP = 4.0
LR = 1e-5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--microbatch-tokens", type=int, default=4096)
    parser.add_argument(
        "--fixed", action="store_true", help="completions of one length instead of ragged ones"
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of a table")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    work = GrpoStepSizes(mean_tokens=None, max_tokens=80) if options.fixed else GrpoStepSizes()
    batch = sequences(work)
    tokens = sum(map(len, batch))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model"
        make_model(path, work)
        ours = megarl_step(path, options.microbatch_tokens)
        theirs = transformers_step(path, options.microbatch_tokens)
        seconds: dict[str, list[float]] = {"megarl": [], "transformers": []}
        for step in range(options.steps + 1):
            for name, run in (("megarl", ours), ("transformers", theirs)):
                begin = time.perf_counter()
                run(batch)
                if step:
                    seconds[name].append(time.perf_counter() - begin)
    if options.json:
        completion_tokens = tokens - len(batch) * work.prompt_tokens
        speed = {
            f"{name}_completion_tokens_per_second": completion_tokens / statistics.median(s)
            for name, s in seconds.items()
        }
        print(json.dumps(speed))
        return
    lengths = f"{len(batch)} sequences, {tokens} tokens, longest {max(map(len, batch))}"
    print(f"{lengths}; {options.threads} threads; median of {options.steps} steps")
    speed = {name: tokens / statistics.median(values) for name, values in seconds.items()}
    for name, value in speed.items():
        print(f"{name:14} {value:9,.0f} tokens/s")
    print(f"ratio          {speed['megarl'] / speed['transformers']:9.2f}")


def sequences(work: GrpoStepSizes) -> list[TrainSequence]:
    """Return one step's sequences, with geometric completion lengths cut off at the
    cap, or the cap for all.
    """
    draw = np.random.default_rng(0)
    lengths = np.full(work.completions, work.max_tokens)
    if work.mean_tokens:
        lengths = np.minimum(
            draw.geometric(1 / work.mean_tokens, work.completions), work.max_tokens
        )
    out = []
    for i, n in enumerate(lengths.tolist()):
        mask = np.arange(work.prompt_tokens + n) >= work.prompt_tokens
        out.append(
            TrainSequence(
                ticket=i // work.generations,
                sample=i % work.generations,
                tokens=draw.integers(4, VOCABULARY, len(mask)).astype(np.int32),
                behaviour_logprobs=np.where(mask, np.float32(-6.9), np.float32(0)),
                loss_weight=np.where(mask, np.float32(1 / lengths.sum()), np.float32(0)),
                advantage=float(draw.choice((-1.0, 1.0))),
            )
        )
    return out


def megarl_step(path: Path, microbatch_tokens: int) -> Callable[[list[TrainSequence]], float]:
    optimizer = {"lr": LR, "warmup_steps": 0}
    recipe = recipes.from_tree(
        {
            "model": {"path": str(path), "dtype": "fp32"},
            "loss": {"cap": CAP},
            "learner": {"microbatch_tokens": microbatch_tokens, "optimizer": optimizer},
        }
    )
    parallel.start(recipe.model, seed=0, timeout_s=60)
    trainer = Trainer(recipe, path)
    return lambda batch: trainer.train_step(batch)["loss"]


def transformers_step(path: Path, microbatch_tokens: int) -> Callable[[list[TrainSequence]], float]:
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)

    def step(batch: list[TrainSequence]) -> float:
        longest = max(map(len, batch))
        prompt = int(np.flatnonzero(batch[0].loss_weight)[0])
        total = 0.0
        optimizer.zero_grad()
        for part in torch.arange(len(batch)).split(max(1, microbatch_tokens // longest)):
            chosen = [batch[i] for i in part.tolist()]
            ids, behaviour, weight, mask = (padded(column, longest) for column in columns(chosen))
            logits = model(
                ids.long(), attention_mask=mask, logits_to_keep=longest - prompt + 1
            ).logits[:, :-1]
            logp = torch.log_softmax(logits, -1).gather(-1, ids[:, prompt:, None].long())[..., 0]
            ratio = (logp.detach() - behaviour[:, prompt:]).exp().clamp(max=CAP)
            loss = -(ratio * weight[:, prompt:] * logp).sum()
            loss.backward()
            total += float(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total

    return step


def columns(batch: list[TrainSequence]) -> list[list[np.ndarray]]:
    """Return token ids, behaviour log-probs, advantage x weight, and attention mask,
    each with one array per sequence.
    """
    return [
        [s.tokens for s in batch],
        [s.behaviour_logprobs for s in batch],
        [s.loss_weight * np.float32(s.advantage) for s in batch],
        [np.ones(len(s), np.float32) for s in batch],
    ]


def padded(rows: list[np.ndarray], length: int) -> torch.Tensor:
    """Return the rows as one tensor [rows, length], padded with zeros at the end."""
    return torch.from_numpy(np.stack([np.pad(row, (0, length - len(row))) for row in rows]))


if __name__ == "__main__":
    main()
