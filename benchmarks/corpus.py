"""Many small, complete runs, to test forecasts with.

    python -m benchmarks.corpus [--dry-run] [--seeds 0,1,2] [--dir DIR] [--task N]
    [key=value …]

    DIR/data ─► DIR/models/SIZE ─`megarl sft`─► DIR/models/SIZE-TASK
                    ─► a study of KINDS ─► DIR/records/NAME.jsonl.gz

A kind is a shipped recipe with a policy size and a dtype. Runs are evaluated, on 4,096
answers, at steps that grow by a factor, so that each part of the curve has points; a
run continues until its curve has flattened. All runs with the same size, task and
family begin with one warm start.

A record is JSON lines: a description of the run (`CorpusRun`), its scores, and its
steps with all their metrics. Compute is in FLOP, from the generated tokens and the
active parameters, so that other work on the machine does not shift a point.
"""

import argparse
import gzip
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megarl.core.base.rundir import Row, latest_rows, latest_scores, write_atomically
from megarl.core.base.types import JsonObject
from megarl.core.recipe import Recipe, load
from megarl.predict.scaling.points import Curve
from megarl.predict.study.main import run_study
from megarl.predict.study.plan import StudyTask
from megarl.predict.study.running import StudyHooks, StudyOptions
from megarl.tasks.data import arithmetic
from megarl.tasks.data.arithmetic_models import LLAMA, LLAMA4, save_model


class Size(NamedTuple):
    """A tiny policy: hidden size, layers, heads, key-value heads, and settings of its
    training.
    """

    hidden: int
    layers: int
    heads: int
    groups: int
    lr: float
    sft_steps: int

    def config(self, experts: bool) -> JsonObject:
        """Return the content of config.json. With experts the model has as many active
        parameters as without.
        """
        base = LLAMA4 | {"head_dim": self.hidden // self.heads} if experts else LLAMA
        widths = {
            "intermediate_size": self.hidden * 3 // 2,
            "intermediate_size_mlp": self.hidden * 3,
        }
        return base | {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.groups,
            **(widths if experts else {"intermediate_size": self.hidden * 3}),
        }

    @property
    def active(self) -> int:
        """The approximate number of active parameters in the layers."""
        return self.layers * self.hidden**2 * (2 + 2 * self.groups // self.heads + 9)


SIZES = {
    "0.3m": Size(96, 3, 3, 1, 2e-4, 600),
    "0.8m": Size(128, 4, 4, 2, 1.5e-4, 500),
    "2m": Size(192, 5, 6, 2, 1e-4, 400),
    "5m": Size(256, 6, 8, 4, 7e-5, 300),
}


class Kind(NamedTuple):
    """A kind of run. Runs of one kind differ only in their seed. recipe: a quickstart's
    name, or a baseline's and `-tiny`: with the quickstart as its base.
    """

    recipe: str
    size: str
    dtype: str = "fp32"

    @property
    def name(self) -> str:
        return "-".join(self)

    @property
    def task(self) -> str:
        return "products" if self.recipe == "quickstart-tools" else "arithmetic"

    @property
    def experts(self) -> bool:
        return self.recipe == "quickstart-moe"

    @property
    def init(self) -> str:
        return f"{self.size}-moe" if self.experts else self.size


KINDS = (
    Kind("quickstart", "0.3m"),
    Kind("quickstart", "5m"),
    Kind("quickstart-moe", "0.8m", "bf16"),
    Kind("quickstart-tools", "0.8m", "bf16"),
    Kind("quickstart", "0.8m"),
    Kind("quickstart", "2m"),
    Kind("quickstart", "0.8m", "bf16"),
    Kind("quickstart", "2m", "fp16"),
    Kind("quickstart-moe", "0.3m"),
    Kind("quickstart-moe", "2m"),
    Kind("quickstart-tools", "0.3m"),
    Kind("quickstart-tools", "2m"),
    Kind("grpo-tiny", "0.8m"),
    Kind("dapo-tiny", "0.3m", "bf16"),
    Kind("gspo-tiny", "0.8m", "fp16"),
    Kind("dr-grpo-tiny", "2m"),
)
"""The first four are a pilot, from which the hours of all can be estimated."""

RUN = (
    "run.steps=150",
    "evaluation.prompts=512",
    "evaluation.samples=8",  # 4,096 answers: noise of at most .008
    "evaluation.every=3",
    "evaluation.growth=1.4",
    "checkpoint.every=50",
    "checkpoint.keep=1",
)


def recipes(directory: Path, overrides: tuple[str, ...] = ()) -> dict[str, Recipe]:
    """Return the recipe of each kind, by its name."""
    return {
        kind.name: load(
            kind.recipe.removesuffix("-tiny"),
            ["base=quickstart", *_places(directory, kind), *RUN, *overrides],
        )
        for kind in KINDS
    }


def _places(directory: Path, kind: Kind) -> Iterator[str]:
    prefix = "products-" if kind.task == "products" else ""
    size = SIZES[kind.size]
    for part in ("train", "heldout"):
        yield f"data.tasks.{kind.task}.{part}={directory}/data/{prefix}{part}.jsonl"
    yield f"model.path={warm_start(directory, kind)}"
    yield f"model.dtype={kind.dtype}"
    yield f"learner.optimizer.lr={size.lr}"
    yield f"sft.init={directory}/models/{kind.init}"
    yield f"sft.data={directory}/data/{prefix}sft.jsonl"
    yield f"sft.steps={size.sft_steps}"


def warm_start(directory: Path, kind: Kind) -> Path:
    return directory / "models" / f"{kind.init}-{kind.task}"


def before(task: StudyTask) -> list[list[str]]:
    """Make the data and the random model from which the run starts; return the warm
    start's command if that is missing.
    """
    kind = next(kind for kind in KINDS if kind.name == task.variant)
    if not (task.study / "data" / "init-moe").exists():  # `write` makes this last
        arithmetic.write(task.study / "data", seed=0)
    if warm_start(task.study, kind).exists():
        return []
    (task.study / "models").mkdir(exist_ok=True)
    save_model(task.study / "models" / kind.init, SIZES[kind.size].config(kind.experts), seed=0)
    # In fp32, so that runs of one size start from the same weights whatever their
    # dtype.
    return [
        [sys.executable, "-m", "megarl", "sft", str(task.recipe), "model.dtype=fp32", "run.seed=0"]
    ]


@dataclass(frozen=True)
class CorpusRun:
    """A run and its results. scores: rows of eval.jsonl, with an added `flop`; steps:
    rows of metrics.jsonl.
    """

    recipe: str
    size: str
    dtype: str
    task: str
    seed: int
    machine: str
    versions: Mapping[str, str]
    scores: tuple[Row, ...]
    steps: tuple[Row, ...]

    @property
    def name(self) -> str:
        return f"{'-'.join((self.recipe, self.size, self.dtype))}-seed{self.seed}"

    @property
    def held_out(self) -> bool:
        """Whether the run must not be used to develop forecasts. It is the same for all
        seeds and dtypes. The leading 0 is the first salt for which both parts have each
        task, dense models, experts and low precision. It was chosen before any run
        existed.
        """
        return sha256(f"0/{self.recipe}/{self.size}/{self.task}".encode()).digest()[0] % 2 == 0

    @property
    def curve(self) -> Curve:
        """The run's held-out pass rates. The curve's hours are petaFLOP here."""
        later = [row for row in self.scores if row["step"]]
        flop, rates = (
            np.array([row[name] for row in later], float) for name in ("flop", "pass_rate")
        )
        answers = int(self.scores[0]["n_prompts"] * self.scores[0]["samples"])
        return Curve(
            self.name,
            flop / 1e15,
            rates,
            self.scores[0]["pass_rate"],
            "core",
            self.seed,
            answers=answers,
        )


def record_of(task: StudyTask) -> Path:
    return task.study / "records" / f"{task.name}.jsonl.gz"


def record(task: StudyTask) -> None:
    """Write the record of a finished run."""
    kind = next(kind for kind in KINDS if kind.name == task.variant)
    steps = [_short(row) for row in latest_rows(task.rundir.metrics)]
    scores = [_short(row) for row in latest_scores(task.rundir.eval)]
    tokens = np.cumsum([0.0, *(row["generated_tokens"] for row in steps)])
    for row in scores:
        row["flop"] = float(
            8 * SIZES[kind.size].active * tokens[row["step"]]
        )  # 2 to generate, 6 to train
    packages = {name: version(name) for name in ("megarl", "torch", "sglang", "megatron-core")}
    machine = f"{os.cpu_count()} cores, {platform.machine()}"
    run = CorpusRun(
        kind.recipe, kind.size, kind.dtype, kind.task, task.seed, machine, packages, (), ()
    )
    lines = [asdict(run), *({"score": row} for row in scores), *({"step": row} for row in steps)]
    record_of(task).parent.mkdir(exist_ok=True)
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    write_atomically(record_of(task), gzip.compress(data, mtime=0))


def _short(row: Row) -> Row:
    """Return the row with numbers rounded to six digits, without the columns of
    forecasts.
    """
    return {
        key: value if isinstance(value, str | int) else float(f"{value:.6g}")
        for key, value in row.items()
        if not key.startswith("predicted_")
    }


def read(path: Path) -> CorpusRun:
    first, *rows = (json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines())
    parts = {part: tuple(row[part] for row in rows if part in row) for part in ("score", "step")}
    return CorpusRun(**first | {"scores": parts["score"], "steps": parts["step"]})


def run(options: StudyOptions) -> int:
    """Run the corpus, or one task of it, and record each run as it ends."""
    path = Path(options.directory)
    hooks = StudyHooks(before, lambda task: record_of(task).exists(), record)
    return run_study(
        "corpus", recipes(path, tuple(options.overrides)), options, hooks, end=lambda _: 0
    )


def main() -> int:
    """Run what the command line asks for; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.corpus")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--dir", default="runs/studies/corpus")
    parser.add_argument("--task", type=int, help="number of the only task to run")
    parser.add_argument("--dry-run", action="store_true")
    given = parser.parse_args()
    return run(StudyOptions(given.seeds, given.dir, given.task, given.dry_run, given.overrides))


if __name__ == "__main__":
    sys.exit(main())
