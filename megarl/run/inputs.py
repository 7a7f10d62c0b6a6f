"""What a run is given, read whole before anything starts, and the fingerprints by which it is known again.

    model.path, reference.path, critic.path ──► config.json, tokenizer, weights ─┐
    data.tasks ──► prompts as the model sees them, with answers ─────────────────┼─► fingerprints ──► RUN/fingerprints.json
    evaluation.suites ──► questions, which a resumed run may change

A run that goes on compares: contents that differ from those it began with are other steps under the same path. Files of up to
WHOLE bytes count with all their bytes; of larger ones (shards of weights) the size and BLOCKS blocks, spread evenly from the
first byte to the last, so that a checkpoint of a terabyte is known within seconds.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from megarl.core.base.errors import MegarlError
from megarl.core.base.hf_files import read_json
from megarl.core.base.tokenizer import load_tokenizer
from megarl.core.base.types import Prompt, encode
from megarl.core.models import shapes
from megarl.core.recipe import Recipe
from megarl.tasks.data.prompts import load_tasks

WHOLE = 64 << 20
BLOCKS, BLOCK = 16, 1 << 20
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

type Fingerprints = Mapping[str, str]
"""By the key of the recipe and what of it: `model.path: weights`."""


def read_inputs(recipe: Recipe) -> Fingerprints:
    """Of all that decides what the run's steps are. MegarlError for what cannot be read."""
    shapes.read(recipe.model.path)
    tokenizer = load_tokenizer(recipe.model.path)
    found = {"model.path: tokenizer": _of_files(Path(recipe.model.path) / name for name in TOKENIZER)}
    models = {"model.path": recipe.model.path}
    if recipe.reference.coefficient and recipe.reference.path:
        models["reference.path"] = recipe.reference.path
    if recipe.has_critic and recipe.critic.path:
        models["critic.path"] = recipe.critic.path
    for key, path in models.items():
        folder = Path(path)
        found[f"{key}: config.json"] = _of_files([folder / "config.json"])
        found[f"{key}: weights"] = _of_files(
            [*sorted(folder.glob("*.safetensors")), *sorted(folder.glob("*.safetensors.index.json"))]
        )
    for name, prompts in load_tasks(recipe, tokenizer).items():
        found[f"data.tasks.{name}.train: prompts"] = _of_prompts(prompts.train)
        found[f"data.tasks.{name}.heldout: prompts"] = _of_prompts(prompts.heldout)
    if recipe.evaluation.suites:
        from megarl.lab.evaluation import suites  # it brings scipy

        for name, suite in recipe.evaluation.suites.items():
            suites.load(name, suite, tokenizer, recipe.length.prompt_tokens, recipe.data.decontaminate)
    return found


def changed(file: Path, now: Fingerprints) -> list[str]:
    """What of the run's own fingerprints is another one now. MegarlError if they are not there."""
    if not file.exists():
        raise MegarlError(
            f"{file}: is gone, so nobody can tell whether model and prompts are those that the run began with; put it back, "
            "or, if you are sure of them, write {} into it"
        )
    before = read_json(file)
    return [key for key in now if before.get(key, now[key]) != now[key]]


def stored(fingerprints: Fingerprints) -> bytes:
    """What is written into the file."""
    return json.dumps(dict(fingerprints), indent=2).encode() + b"\n"


def _of_files(paths: Iterable[Path]) -> str:
    """Of those that exist: names, sizes and contents, of large ones a sample."""
    found = hashlib.blake2b(digest_size=16)
    for path in paths:
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                found.update(f"{path.name}\0{size}\0".encode())
                if size <= WHOLE:
                    found.update(file.read())
                    continue
                for n in range(BLOCKS):
                    file.seek(n * (size - BLOCK) // (BLOCKS - 1))
                    found.update(file.read(BLOCK))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise MegarlError(f"{path}: cannot be read: {error.strerror}") from None
    return found.hexdigest()


def _of_prompts(prompts: Iterable[Prompt]) -> str:
    """Of all that is known of each, in their order."""
    found = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        found.update(encode(prompt))
    return found.hexdigest()
