"""Whatever data, config.json and the tokenizer's files contain, the checks of a run
read it or print one message, quickly.
"""

import json
import shutil
import time
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from megarl.checks import inputs
from megarl.core.base.errors import MegarlError
from megarl.core.recipe import Recipe
from tests.unit.fuzz.hostile import changed, lines, rows_like

LIMIT_S = 10.0
LONGEST = 8_000  # seconds of a core, characters
ROW = {"id": "7", "prompt": "7+1=", "answer": "8", "difficulty": 1}
FILES = (
    "train.jsonl",
    "heldout.jsonl",
    "model/config.json",
    "model/tokenizer_config.json",
    "model/tokenizer.json",
    "model/model.safetensors",
    "model/model.safetensors.index.json",
    "model/chat_template.jinja",
)


@settings(suppress_health_check=list(HealthCheck), phases=(Phase.generate,))
@given(data=st.data())
def test_any_file_that_a_run_is_given(recipe: Recipe, tmp_path: Path, data: st.DataObject) -> None:
    kept = tmp_path / "kept"
    if not kept.exists():
        shutil.copytree(tmp_path, kept)
    for (
        name
    ) in FILES:  # one that an example left, because it ended in an error, is not there for the next
        (tmp_path / name).unlink(missing_ok=True)
    shutil.copytree(kept, tmp_path, dirs_exist_ok=True)
    name = data.draw(st.sampled_from(FILES))
    file = tmp_path / name
    before = file.read_bytes() if file.exists() else b"{{ messages }}"
    like = st.just(b"") | changed(before)
    if name.endswith(".jsonl"):
        like |= lines(rows_like(ROW))
    elif name.endswith(".json") and file.exists():
        like |= rows_like(json.loads(before)).map(lambda row: json.dumps(row).encode())
    template = data.draw(st.sampled_from(["raw", "chat"]))
    tasks = {
        key: task.model_copy(update={"template": template})
        for key, task in recipe.data.tasks.items()
    }
    made = recipe.model_copy(update={"data": recipe.data.model_copy(update={"tasks": tasks})})
    there = file.exists()
    file.write_bytes(data.draw(like))
    begun = time.process_time()
    said = "-"
    try:
        inputs.check_all(made)
    except MegarlError as error:
        said = str(error)
    if not there:
        file.unlink()
    assert 0 < len(said) < LONGEST
    assert time.process_time() - begun < LIMIT_S
