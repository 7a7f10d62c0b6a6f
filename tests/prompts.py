"""A file of prompts, without the recipe that names it."""

from pathlib import Path

from megarl.core.base.tokenizer import Tokenizer
from megarl.core.base.types import Prompt
from megarl.tasks.data.mappings import read_own
from megarl.tasks.data.prompts import load_set
from megarl.tasks.data.survey import survey_of


def load_prompts(
    path: Path | str, tokenizer: Tokenizer, max_tokens: int, task: str
) -> list[Prompt]:
    """The prompts of a source in the project's own form that are at most `max_tokens`
    long, in the source's order.
    """
    found = load_set(
        survey_of(str(path), read_own),
        lambda row: row.prompt,
        tokenizer,
        max_tokens,
        task,
        str(path),
    )[0]
    return list(found.prompts)
