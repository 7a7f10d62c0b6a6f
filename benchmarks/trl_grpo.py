"""Measures TRL's GRPOTrainer (`loss_type="cispo"`, CPU) on the benchmark's workload:
completion tokens/s, rollout and training.

    PYTHONPATH=.bench:. python -m benchmarks.trl_grpo MODEL_DIR '{"prompts": 16, …}'

It prints one JSON line.

The reward is random: it costs nothing, and leaves no group without variance.
"""

import json
import random
import sys
import tempfile
import warnings
from typing import Any

warnings.simplefilter("ignore")

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from benchmarks.real_comparison import TrainingWatch  # noqa: E402
from benchmarks.workload import GrpoStepSizes, prompt_texts  # noqa: E402


class Clock(TrainerCallback):
    """Records the seconds since training began at the end of each step."""

    def __init__(self) -> None:
        self.watch = TrainingWatch()
        self.ends: list[float] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.watch.start()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(self.watch.seconds())


def settings(**others: Any) -> GRPOConfig:
    """Return ScaleRL's loss on a CPU, with these settings of GRPOConfig too; they take
    precedence.
    """
    common = {
        "loss_type": "cispo",
        "epsilon_high": 4.0,
        "scale_rewards": "batch",
        "beta": 0.0,
        "temperature": 1.0,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return GRPOConfig(**common | others)


def main() -> None:
    path = sys.argv[1]
    work = GrpoStepSizes(**json.loads(sys.argv[2]))
    torch.set_num_threads(2)
    tokens: list[int] = []
    random.seed(0)

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        tokens.append(sum(map(len, completion_ids)))
        return [random.choice((-1.0, 1.0)) for _ in completion_ids]

    clock = Clock()
    with tempfile.TemporaryDirectory() as out:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
            reward_funcs=reward,
            processing_class=AutoTokenizer.from_pretrained(path, padding_side="left"),
            train_dataset=Dataset.from_dict(
                {"prompt": prompt_texts(work, work.prompts * (work.steps + 1))}
            ),
            callbacks=[clock],
            args=settings(
                output_dir=out,
                num_generations=work.generations,
                per_device_train_batch_size=work.completions,
                max_completion_length=work.max_tokens,
                max_steps=work.steps,
                learning_rate=1e-6,
            ),
        )
        trainer.train()
    seconds = clock.ends[-1] - clock.ends[work.warmup_steps - 1]
    measured = tokens[work.warmup_steps :]
    print(
        json.dumps(
            {
                "tokens_per_second": sum(measured) / seconds,
                "tokens_per_step": sum(measured) / len(measured),
            }
        )
    )


if __name__ == "__main__":
    main()
