"""This version reads an earlier version's run directory, except its journal, which it
refuses with a message that names it.

old_run.tar.xz is a run of six steps, with a grader and a loss of a user.
"""

import contextlib
import hashlib
import json
import tarfile
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from checkpoints_tools.__main__ import main as checkpoints_tools
from megarl.core.base.rundir import latest_rows
from megarl.core.base.types import SCHEMA_VERSION
from megarl.core.journal.file import FILE_HEADER
from tests.e2e.runs import megarl

OLD = Path(__file__).with_name("old_run.tar.xz")
ROLLOUTS = "07091f1bd9475a32647813508aa5d9a4a5d0745151c48891ac3f3a00caaa5141"
WEIGHTS = "cec16749590ca7483618e359cb4edafd33312a36ab15866d728032335bfea7d0"
"""SHA-256 of what the earlier megarl showed of its journal, and of the weights that it
exported.
"""


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()


def renumber(journal: Path) -> None:
    """Say that files of schema 2 are of this one, which they are but for fields with
    defaults: a group's paths, and of an episode the tokens made in vain.
    """
    for path in journal.glob("*.journal"):
        data = bytearray(path.read_bytes())
        magic, version = FILE_HEADER.unpack_from(data)
        assert version == 2
        FILE_HEADER.pack_into(data, 0, magic, SCHEMA_VERSION)
        path.write_bytes(data)


@pytest.mark.stack
@pytest.mark.timeout(1200)
@pytest.mark.slow
def test_an_old_run_is_read_and_goes_on(workplace: Path, tmp_path: Path) -> None:
    with tarfile.open(OLD) as archive:
        archive.extractall(tmp_path, filter="data")
    (tmp_path / "runs" / "quickstart-data").symlink_to(workplace / "runs" / "quickstart-data")
    shown = megarl("rollouts", "show", "runs/old", "--json", "--limit", "100", cwd=tmp_path)
    assert shown.returncode == 2
    assert (
        f"written in schema version 2, this version of megarl reads {SCHEMA_VERSION}"
        in shown.stderr + shown.stdout
    )
    renumber(tmp_path / "runs" / "old" / "rollouts")
    shown = megarl("rollouts", "show", "runs/old", "--json", "--limit", "100", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    groups = [json.loads(line) for line in shown.stdout.splitlines()]
    rollouts = [
        [
            g["ticket"],
            g["prompt"]["tokens"],
            r["reward"],
            [[s["weight_version"], s["tokens"]] for s in r["segments"]],
        ]
        for g in groups
        for r in g["rollouts"]
    ]
    assert digest(json.dumps(rollouts).encode()) == ROLLOUTS

    with contextlib.chdir(tmp_path):
        assert checkpoints_tools(["convert", "megatron-to-hf", "runs/old", "exported"]) == 0
    weights = load_file(tmp_path / "exported" / "model.safetensors")
    assert digest(*(name.encode() + weights[name].tobytes() for name in sorted(weights))) == WEIGHTS

    metrics = tmp_path / "runs" / "old" / "metrics.jsonl"
    before = latest_rows(metrics)
    went_on = megarl("train", "runs/old/recipe.yaml", "run.steps=8", cwd=tmp_path)
    assert went_on.returncode == 0, went_on.stdout + went_on.stderr
    after = latest_rows(metrics)
    assert after[: len(before)] == before
    assert [row["step"] for row in after] == list(range(8))
    assert "tapered_share" in after[-1]
