"""lm-evaluation-harness in a process of its own: `python -m tests.stack.harness FOLDER`
reads and writes in FOLDER.

model/ (weights and tokenizer), TASK.jsonl
  ──► its own arc_easy, hellaswag, truthfulqa, nq_open and gsm8k on these rows
  ──► local_TASK.yaml, harness.json: {"results": {task: {metric: value}},
                                      "samples": {task: [what it says of each row]}}

Its gsm8k would look for a number, and stop at "Question:"; the tiny model writes none:
all that it writes is compared.
"""

import json
import sys
from pathlib import Path
from typing import Any

import lm_eval
import torch
import yaml
from lm_eval.tasks import TaskManager

ITS_TASKS = Path(lm_eval.__file__).parent / "tasks"
TASKS = {
    "arc": "arc/arc_easy.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "mc1": "truthfulqa/truthfulqa_mc1.yaml",
    "mc2": "truthfulqa/truthfulqa_mc2.yaml",
    "nq": "nq_open/nq_open.yaml",
    "gsm8k": "gsm8k/gsm8k.yaml",
}
GENERATED = 40
"""Tokens, where the harness would take 256."""


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    for name, own in TASKS.items():
        changes: dict[str, Any] = {
            "include": str(ITS_TASKS / own),
            "task": f"local_{name}",
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {"validation": str(folder / f"{name}.jsonl")}},
            "training_split": None,
            "validation_split": "validation",
            "test_split": None,
            "num_fewshot": 0,
        }
        if name == "gsm8k":
            changes |= {
                "fewshot_split": "validation",
                "generation_kwargs": {"until": [], "do_sample": False, "max_gen_toks": GENERATED},
                "metric_list": [
                    {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}
                ],
                "filter_list": [{"name": "whole", "filter": [{"function": "take_first"}]}],
            }
        if name == "nq":
            options = {"until": ["\n", ".", ","], "do_sample": False, "max_gen_toks": GENERATED}
            changes["generation_kwargs"] = options
        (folder / f"local_{name}.yaml").write_text(yaml.safe_dump(changes))
    found = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder / "model"), "dtype": "float32", "max_length": 2048},
        tasks=[f"local_{name}" for name in TASKS],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        device="cpu",
        batch_size=1,
        bootstrap_iters=0,
        log_samples=True,
    )
    assert found is not None
    told = {
        "results": {name: found["results"][f"local_{name}"] for name in TASKS},
        "samples": {
            name: sorted(found["samples"][f"local_{name}"], key=lambda s: s["doc_id"])
            for name in TASKS
        },
    }
    (folder / "harness.json").write_text(json.dumps(told, default=str))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
