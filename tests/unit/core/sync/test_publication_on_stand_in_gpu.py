"""With one server and on a GPU, too, a publication is checked against what the learner
sent.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import stand_in_gpu
from tests.stand_in_gpu.publication import MODELS, VICTIM

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, list[str]]]:
    folder = tmp_path_factory.mktemp("published")
    for name, tiny in MODELS.items():
        tiny(folder / name, torch.bfloat16)
    words = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.stand_in_gpu.publication",
        str(folder),
        str(folder / "found.json"),
    ]
    environment = stand_in_gpu.environment(folder) | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-6000:]
    read: dict[str, tuple[int, list[str]]] = json.loads((folder / "found.json").read_text())
    return read


@pytest.mark.parametrize("name", MODELS)
def test_what_one_server_did_not_take_is_named(
    found: dict[str, tuple[int, list[str]]], name: str
) -> None:
    parameters, (arrived, changed, lost) = found[name]
    assert parameters > 10
    assert arrived == ""

    for version, error in ((2, changed), (3, lost)):
        assert error.startswith(
            f"publishing version {version} to server 0: checksum: 1 differ, such as model.layers.1."
        )
        assert error.rpartition(" ")[2].split(".")[:4] == VICTIM[name].split(".")[:4]
