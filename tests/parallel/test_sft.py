"""`megarl sft` as a process: what it writes is a Hugging Face model that has learnt the traces, judged by transformers."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl import recipe as recipes
from megarl.data import arithmetic
from tests.parallel.worlds import run_world

STEPS = 40


def loss_by_transformers(folder: Path, rows: list[dict[str, str]]) -> float:
    """Nats per completion token, the end token included."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    total, count = 0.0, 0
    with torch.no_grad():
        for row in rows:
            prompt = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
            completion = [*tokenizer(row["completion"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            ids = torch.tensor([prompt + completion])
            labels = ids.clone()
            labels[:, : len(prompt)] = -100
            total += float(model(ids, labels=labels).loss) * len(completion)
            count += len(completion)
    return total / count


def test_the_warm_start_learns_and_is_written_whole(tmp_path: Path) -> None:
    arithmetic.write(tmp_path / "data", 0)
    recipe = recipes.from_tree(
        {
            "model": {"dtype": "fp32"},
            "sft": {
                "init": str(tmp_path / "data" / "init"),
                "data": str(tmp_path / "data" / "sft.jsonl"),
                "output": str(tmp_path / "warm"),
                "steps": STEPS,
                "batch_tokens": 1024,
                "max_length": 128,
                "optimizer": {"lr": 2e-3, "warmup_steps": 5},
            },
        }
    )
    (tmp_path / "recipe.yaml").write_text(recipes.dump(recipe))
    run_world(1, "megarl", "sft", str(tmp_path / "recipe.yaml"))
    rows = [json.loads(line) for line in (tmp_path / "data" / "sft.jsonl").read_text().splitlines()[:40]]
    before, after = (loss_by_transformers(path, rows) for path in (tmp_path / "data" / "init", tmp_path / "warm"))
    assert after < 0.7 * before
    with pytest.raises(AssertionError, match="exists already"):
        run_world(1, "megarl", "sft", str(tmp_path / "recipe.yaml"))
