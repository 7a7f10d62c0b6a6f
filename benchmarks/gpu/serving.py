"""Shared by parts with SGLang: a random model on disk that a run can train,
`scalerl-1gpu` for it, and one server.

    one_gpu(folder, tiny, "run.steps=8") ──► Recipe ──► served(recipe)   a server alone
                                                    └─► megarl train     training.py

Each token has a text of its own, so that a reward by a hash of the text differs between
completions.
"""

import importlib.util
import json
import random
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from benchmarks import roles
from benchmarks.gpu import networks
from benchmarks.gpu.rows import Absent
from megarl.core import recipe as recipes
from megarl.core.base.architecture import CONFIGS
from megarl.core.base.rundir import write_jsonl
from megarl.core.models import build, family_of, hf, parallel
from megarl.core.recipe import Recipe
from megarl.tasks.data.arithmetic_models import CHARACTERS, END, INTERRUPTION, SPECIAL

START_LIMIT_S = 300
"""A first server compiles its kernels, ten seconds of a core each, one after the other.
"""
served = partial(roles.served, limit_s=START_LIMIT_S)
PROMPTS = 1024
WHOLE = (
    "run.seed=0",
    "length.prompt_tokens=16",
    "length.thinking_tokens=[192,224]",
    "length.answer_tokens=32",
    "learner.optimizer.warmup_steps=2",
    "data.tasks.math.template=raw",
    "data.tasks.math.system=",
    "data.tasks.math.grader=benchmarks.parity.__main__:coin",
    f"length.interruption={INTERRUPTION}",
    "evaluation.every=100000",
    "evaluation.prompts=1",
    "evaluation.samples=1",
)
"""`scalerl-1gpu` with completions of at most 256 tokens, graded by a hash of their
text.
"""
TINY = (
    "resources.colocate=false",
    "resources.threads=1",
    "weights.transport=process_group",
    "weights.bucket_mb=1",
    "serving.memory_fraction=null",
    "serving.kv_tokens=32768",
    "length.thinking_tokens=[24,28]",
    "length.answer_tokens=4",
    "batch.prompts=4",
    "sampling.generations=4",
)


def need_sglang() -> None:
    if importlib.util.find_spec("sglang") is None:
        raise Absent("SGLang is not installed")


def one_gpu(folder: Path, tiny: bool, *overrides: str) -> Recipe:
    """Return `scalerl-1gpu` with its paths in `folder`, where model and prompts are
    made unless they exist.
    """
    prompts = folder / "prompts.jsonl"
    if not prompts.exists():
        draw = random.Random(0)
        write_jsonl(
            prompts,
            (
                {"id": str(n), "prompt": f"{draw.randrange(10**9)}=", "answer": "0"}
                for n in range(PROMPTS)
            ),
        )
    config = json.loads((CONFIGS / "qwen3-1.7b.json").read_text())
    path = random_model(config | (networks.TINY | {"num_hidden_layers": 2} if tiny else {}), folder)
    own = (
        f"model.path={path}",
        f"data.tasks.math.train={prompts}",
        "data.tasks.math.heldout=16",
        f"run.dir={folder}",
    )
    return recipes.load("scalerl-1gpu", [*WHOLE, *(TINY if tiny else ()), *own, *overrides])


def random_model(config: dict[str, Any], folder: Path) -> Path:
    """Write a bf16 model in Hugging Face format, with a text for each of its tokens;
    return its directory.
    """
    path = folder / "model"
    if path.exists():
        return path
    recipe = networks.recipe_of(
        config | {"eos_token_id": SPECIAL.index(END)}, folder / "config", {}
    )
    parallel.start(recipe.model, seed=0, timeout_s=networks.LIMIT_S)
    source = Path(recipe.model.path)
    chunks = build.build(recipe.model, source)
    networks.fill(chunks)
    tokenizer(config["vocab_size"]).save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    hf.save(chunks, family_of(source), source, path)
    del chunks
    networks.forget()
    return path


def tokenizer(vocabulary: int) -> Tokenizer:
    """Return a tokenizer with the quickstart's characters, and made-up words up to the
    vocabulary's size.
    """
    texts = [*SPECIAL, *CHARACTERS]
    texts += [f"<{n}>" for n in range(len(texts), vocabulary)]
    made = Tokenizer(
        models.WordLevel({text: number for number, text in enumerate(texts)}, unk_token="<none>")
    )
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens([*SPECIAL])
    return made


def sizes(recipe: Recipe) -> str:
    shape = networks.shape_of(recipe)
    return (
        f"{shape.layers} layers, hidden {shape.hidden}, vocabulary {shape.vocabulary},"
        f" {recipe.model.dtype}"
    )
