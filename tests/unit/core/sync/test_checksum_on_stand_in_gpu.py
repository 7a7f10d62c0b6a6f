"""A checksum as a GPU would compute it, whose product refuses all but one layout: for
any bytes, a CPU's; and where the product fails or is wrong, by integers, which is said
once.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import stand_in_gpu

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]
ROOT = Path(__file__).parents[4]
SCRIPT = """
import json, logging
import torch
from tests import stand_in_gpu
stand_in_gpu.install()
from megarl.core.sync import checksum as sums
from megarl.core.sync.checksum import COLUMNS, checksum, checksum_on

said = []
class Said(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
logging.getLogger(sums.__name__).addHandler(Said())

GPU, PRODUCT = stand_in_gpu.GPU, torch.ops.aten._int_mm.default
sums.PIECE = 256 * COLUMNS
digits, product = sums._digits, stand_in_gpu.STRICTER_THERE[PRODUCT]

def row_major(device):
    columns, places = digits(device)
    return columns.contiguous(), places

def wrong(a, b):
    return product(a, b) + (a.shape[0] > 200)

def refused(rows, columns):
    try:
        torch._int_mm(rows, columns)
    except RuntimeError as error:
        return str(error)
    return ""

CASES = {"well": (digits, product), "row-major": (row_major, product), "wrong": (digits, wrong)}
found = {}
for name, (of_columns, multiply) in CASES.items():
    said.clear()
    sums.multiplies_exactly.cache_clear()
    sums._digits = of_columns
    stand_in_gpu.STRICTER_THERE[PRODUCT] = multiply
    differ = []
    with stand_in_gpu.plain_operations():
        for size in (0, COLUMNS - 1, 16 * COLUMNS, 17 * COLUMNS, 300 * COLUMNS + 7):
            for offset in (0, 1, 4, 16):
                whole = (torch.arange(size + offset) * 0x9E3779B1).byte()
                data, there = whole[offset:], whole.to(GPU)[offset:]
                if int(checksum(there, 5)) != int(checksum(data, 5)):
                    differ.append((size, offset))
            if int(checksum_on(GPU, data)) != int(checksum(data)):
                differ.append((size, "on"))
        found[name] = {"multiplies": sums.multiplies_exactly(GPU), "said": list(said), "differ": differ}
sums._digits = digits
stand_in_gpu.STRICTER_THERE[PRODUCT] = product
with stand_in_gpu.plain_operations():
    rows, columns = torch.zeros(17, COLUMNS, dtype=torch.int8).to(GPU), digits(GPU)[0]
    shifted = torch.zeros(17 * COLUMNS + 1, dtype=torch.int8).to(GPU)[1:].view(17, COLUMNS)
    found["refused"] = {
        "few rows": refused(rows[:16], columns),
        "row-major": refused(rows, columns.contiguous()),
        "both turned": refused(torch.zeros(COLUMNS, 24, dtype=torch.int8).to(GPU).t(), columns),
        "width": refused(rows, columns[:, :9]),
        "address": refused(shifted, columns),
        "as it is": refused(rows, columns),
    }
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    environment = stand_in_gpu.environment(tmp_path_factory.mktemp("stand_in")) | {
        "PYTHONPATH": str(ROOT)
    }
    words = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    done = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-6000:]
    read: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return read


def test_a_gpus_checksum_is_a_cpus_by_the_product(found: dict[str, Any]) -> None:
    """With few rows, at any address: what the product refuses, it is not given."""
    assert found["well"] == {"multiplies": True, "said": [], "differ": []}


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (
            "row-major",
            (
                "torch._int_mm: CUDA error: CUBLAS_STATUS_NOT_SUPPORTED: a GPU needs a second"
                " operand whose columns are contiguous"
            ),
        ),
        ("wrong", "a product of 256 rows by torch._int_mm was wrong"),
    ],
)
def test_where_the_product_fails_the_sum_is_of_integers(
    found: dict[str, Any], fault: str, why: str
) -> None:
    (line,) = found[fault]["said"]
    assert (
        line
        == f"cuda:0: checksums of weights are summed in 64-bit integers, which takes longer: {why}"
    )
    assert (found[fault]["multiplies"], found[fault]["differ"]) == (False, [])


def test_what_the_stand_in_refuses(found: dict[str, Any]) -> None:
    refused = found["refused"]
    assert refused.pop("as it is") == ""
    needs = {name: text.partition("a GPU needs ")[2] for name, text in refused.items()}
    assert needs == {
        "few rows": "more than 16 rows",
        "row-major": "a second operand whose columns are contiguous",
        "both turned": "a first operand whose rows are contiguous",
        "width": "a second operand whose columns are a multiple of 8",
        "address": "addresses that are multiples of 4",
    }
