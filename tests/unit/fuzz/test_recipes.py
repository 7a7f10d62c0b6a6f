"""Any recipe file or override gives a recipe that can be written and read again, or one
message, quickly.
"""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from megarl.core.base.errors import MegarlError
from megarl.core.recipe import Recipe, describe, dump, load, shipped
from megarl.core.recipe.loading import flat
from tests.unit.fuzz.hostile import changed, values

LIMIT_S = 10.0
LONGEST = 8_000  # seconds of a core, characters
TEXTS = [path.read_bytes() for path in shipped().values()]
KEYS = sorted(flat(Recipe().model_dump(mode="json")))
DEEPER = [
    "data.tasks.a",
    "data.tasks.a.train",
    "data.tasks.a.rewards.x",
    "data.services.s",
    "evaluation.suites.aime24",
    "evaluation.suites.mine",
    "length.stages",
    "run",
    "model",
    "no.such.key",
    "run..x",
    ".",
    "base",
]
"""Keys of what a default recipe has none of, and no keys."""


def loaded(data: bytes, overrides: Sequence[str] = ()) -> None:
    begun = time.process_time()
    with tempfile.NamedTemporaryFile("wb", suffix=".yaml") as file:
        file.write(data)
        file.flush()
        recipe = None
        said = "-"
        try:
            recipe = load(file.name, overrides)
        except MegarlError as error:
            said = str(error)
        assert 0 < len(said) < LONGEST
        for text in () if recipe is None else (dump(recipe), describe(recipe)):
            Path(file.name).write_text(text)
            assert load(file.name) == recipe
    assert time.process_time() - begun < LIMIT_S


@given(data=st.binary(max_size=300) | st.sampled_from(TEXTS).flatmap(changed))
def test_any_file(data: bytes) -> None:
    loaded(data)


@given(tree=st.dictionaries(st.sampled_from(KEYS + DEEPER), values, max_size=4))
def test_any_value_of_any_key(tree: dict[str, Any]) -> None:
    nested: dict[str, Any] = {}
    for key, value in tree.items():
        *parents, last = key.split(".")
        here = nested
        for parent in parents:
            below = here.get(parent)
            here[parent] = below if isinstance(below, dict) else {}
            here = here[parent]
        here[last] = value
    loaded(yaml.safe_dump(nested).encode())


@given(
    words=st.lists(
        st.builds(
            "{}{}{}".format,
            st.sampled_from(KEYS + DEEPER),
            st.sampled_from(["=", "", "=="]),
            st.text(max_size=12),
        )
        | st.text(max_size=20),
        max_size=3,
    )
)
def test_any_override(words: list[str]) -> None:
    loaded(b"run: {seed: 1}\n", words)
