"""The GPU benchmark's machinery: a part that fails, dies, hangs or is absent costs
itself only, and the results say so.
"""

import json
import os
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.gpu import __main__ as benchmark
from benchmarks.gpu import machine, networks, process, report
from benchmarks.gpu.parts import PARTS, Part, checksum, fp8, learner, marked_tests, run
from benchmarks.gpu.parts import server as server_part
from benchmarks.gpu.rows import Absent, Outcome, Row
from megarl.core.recipe import Recipe
from megarl.run.devices import CACHES
from tests.processes import wait_until_gone

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[3]
RUN = ROOT / "benchmarks" / "gpu" / "run.sh"
FIRST = """from benchmarks.gpu.rows import Absent, Row
def rows(tiny):
    yield Row("a rate", 6.0, "GB/s", "2 x 3", "copy", 4.0)
"""
MADE_UP = {
    "well": '    yield "a remark | with a bar"\n    yield {"seconds": [0.5, 1.5]}\n',
    "raises": '    raise ValueError("no such kernel\\nand more")\n',
    "segfault": "    import os, signal\n    os.kill(os.getpid(), signal.SIGSEGV)\n",
    "killed": "    import os, signal\n    os.kill(os.getpid(), signal.SIGKILL)\n",
    "exits": "    import os\n    os._exit(3)\n",
    "absent": '    raise Absent("SGLang is not installed")\n',
    "looks": (
        "    import os, pathlib\n    yield str([p.read_text() for p in"
        ' pathlib.Path(os.environ["OUT"]).glob("*.looks.jsonl")])\n'
    ),
    "caches": (
        '    import os\n    yield os.environ["FLASHINFER_WORKSPACE_BASE"]\n    yield'
        ' os.environ["TMPDIR"]\n'
    ),
    "hangs": (
        "    import os, subprocess, sys, time\n"
        '    words = [sys.executable, "-c", "import time; time.sleep(60)"]\n'
        '    with open(os.environ["TMPDIR"] + "/server.log", "w") as log:\n'
        "        print(subprocess.Popen(words, start_new_session=True).pid, file=log)\n"
        "    time.sleep(60)\n"
    ),
}


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Made-up parts, which a part's process finds."""
    for name, body in MADE_UP.items():
        (tmp_path / f"part_{name}.py").write_text(FIRST + body)
    (tmp_path / "part_unimportable.py").write_text("import a_wheel_that_nobody_brought\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


ENDINGS = {
    "well": ("measured", ""),
    "raises": ("failed", "ValueError: no such kernel"),
    "segfault": ("killed", "by SIGSEGV"),
    "killed": ("killed", "by SIGKILL"),
    "exits": ("failed", "exit status 3"),
    "absent": ("absent", "SGLang is not installed"),
    "unimportable": (
        "failed",
        "ModuleNotFoundError: No module named 'a_wheel_that_nobody_brought'",
    ),
}


def test_each_part_ends_alone(modules: Path, tmp_path: Path) -> None:
    parts = {name: Part(f"part_{name}", 60) for name in ENDINGS}
    outcomes = benchmark.measure(parts, time.monotonic() + 600, True, tmp_path / "out")
    assert {o.part: (o.ending, o.why) for o in outcomes} == ENDINGS
    (text,) = (tmp_path / "out").glob("gpu-*-cpu.json")
    tree = json.loads(text.read_text())
    assert {part["part"]: (part["ending"], part["why"]) for part in tree["parts"]} == ENDINGS
    for part in tree["parts"]:
        rows = (
            0 if part["part"] == "unimportable" else 1
        )  # what was measured before the end is kept
        assert len(part["rows"]) == rows
        assert all(row["ratio"] == 1.5 for row in part["rows"])
    by_name = {part["part"]: part for part in tree["parts"]}
    assert by_name["well"]["remarks"] == ["a remark | with a bar"]
    assert by_name["well"]["raw"] == [{"seconds": [0.5, 1.5]}]
    assert "Traceback" in by_name["raises"]["log"]
    table = text.with_suffix(".md").read_text()
    assert "| well | a rate | 6 GB/s | copy: 4 GB/s | 1.5 | 2 x 3 |" in table
    assert "a remark \\| with a bar |" in table
    assert "| killed | killed | " in table
    assert "by SIGKILL |" in table


@pytest.mark.slow
def test_over_its_limit(modules: Path) -> None:
    """It and what it started are ended, in whatever session; its rows are kept, and
    what its servers wrote.
    """
    outcome = process.run("hangs", "part_hangs", 10.0, tiny=True)
    assert (outcome.ending, outcome.why) == ("over its limit", "not done after 10 s")
    assert len(outcome.rows) == 1
    name, pid, *_ = outcome.log.splitlines()
    assert name == "== scratch/server.log"
    wait_until_gone([int(pid)])


def test_rows_are_in_the_folder_as_they_are_measured(
    modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In case everything is killed."""
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    (outcome,) = benchmark.measure(
        {"looks": Part("part_looks", 60)}, time.monotonic() + 600, True, tmp_path / "out"
    )
    assert len(outcome.rows) == 1
    assert "a rate" in outcome.remarks[0]
    assert not list((tmp_path / "out").glob("*.jsonl"))


def test_parts_share_compiled_kernels(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CACHES:
        monkeypatch.delenv(name, raising=False)
    (first, own), (second, another) = (
        process.run("caches", "part_caches", 60.0, tiny=True).remarks for _ in range(2)
    )
    assert own != another
    assert first == second
    assert not Path(first).is_relative_to(own)


def test_what_matters_most_fits_into_two_commands() -> None:
    """In the README: each below ten minutes, both in 13, with room for all of their
    parts' limits but that of the last, which has what is left. Nothing is measured
    before the checksum.
    """
    text = (RUN.parent / "README.md").read_text()
    found = re.findall(r"run\.sh --wheels wheels --minutes (\d+) --parts (\S+) --output", text)
    minutes = [int(number) for number, _ in found]
    assert max(minutes) < 10
    assert sum(minutes) == 13
    limits = [[PARTS[name].limit_s for name in names.split(",")] for _, names in found]
    assert sum(limits[0]) <= 60 * minutes[0]
    assert sum(limits[1][:-1]) < 60 * minutes[1]
    assert found[0][1].startswith("checksum,publication,")
    assert next(iter(PARTS)) == "checksum"
    for name, part in PARTS.items():
        assert re.search(rf"^\| `{name}` †? ?\| {part.limit_s:.0f} s \|", text, re.MULTILINE), name


def test_the_checksum_is_compared_with_a_cpus() -> None:
    rows = {row.what: row for row in checksum.rows(tiny=True) if isinstance(row, Row)}
    assert rows["equal to a CPU's"].ratio == 1
    assert {rows[what].unit for what in ("on the device", "of what the host holds")} == {"GB/s"}


@pytest.mark.parametrize(
    ("fault", "said", "why"),
    [
        ("multiplies_exactly", 5, "the product of bytes is not exact on this device"),
        ("checksum", 4, "12 of 24 checksums are not a CPU's"),
    ],
)
def test_a_checksum_that_is_wrong_on_the_gpu(
    fault: str, said: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For some pieces, or by another way than a product; what was measured is kept."""
    sums = checksum.checksum
    if fault == "checksum":
        calls = iter(range(10_000))
        monkeypatch.setattr(
            checksum, fault, lambda data, start=0: sums(data, start) + (next(calls) % 4 == 0)
        )
    else:
        monkeypatch.setattr(checksum.sums, fault, lambda _: False)
    rows = checksum.rows(tiny=True)
    measured = [next(rows) for _ in range(said)]
    assert len([each for each in measured if isinstance(each, Row)]) == 4
    with pytest.raises(RuntimeError, match=why):
        next(rows)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fp8_servers_are_measured_on_a_gpu_only(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the recipe's own key; the ratio is to bf16."""
    rates = {
        ("megarl", "none"): 100.0,
        ("megarl", "fp8"): 150.0,
        ("benchmarks.no_overlap", "none"): 80.0,
    }
    serving: list[tuple[str, str]] = []

    @contextmanager
    def served(recipe: Recipe, module: str) -> Iterator[tuple[SimpleNamespace, None, float]]:
        serving.append((module, recipe.serving.quantization))
        yield SimpleNamespace(pid=1), None, 1.0

    async def measured(*_: object) -> dict[str, list[float]]:
        return {"streamed": [rates[serving[-1]]], "bare": [200.0]}

    monkeypatch.setattr(networks, "DEVICE", device)
    monkeypatch.setattr(server_part.server, "measured", measured)
    for name, fake in {
        "need_sglang": lambda: None,
        "random_model": lambda *_: None,
        "sizes": str,
        "served": served,
    }.items():
        monkeypatch.setattr(server_part.serving, name, fake)
    said = list(server_part.rows(tiny=True))
    ratios = {row.reference: row.ratio for row in said if isinstance(row, Row)}
    assert (serving == list(rates)) == (device == "cuda")
    assert ratios.get("bf16") == (1.5 if device == "cuda" else None)
    assert ratios["no overlap"] == 1.25
    assert any(isinstance(each, str) and each.startswith("fp8: ") for each in said) == (
        device == "cpu"
    )


def test_files_of_tests_are_reported_as_they_pass() -> None:
    """A file that hangs reports nothing more; all files before it have reported by
    then.
    """
    lines = [
        "collecting ... collected 4 items\n",
        "tests/unit/test_a.py::test_x[one] PASSED [ 25%]\n",
        "tests/unit/test_a.py::test_y FAILED [ 50%]\n",
        "tests/unit/test_b.py::test_z[a b] SKIPPED (no NVIDIA GPU) [ 75%]\n",
        "FAILED tests/unit/test_a.py::test_y - assert 0\n",
    ]
    said = marked_tests.passed_by_file(iter(lines))
    assert list(said) == [
        "tests/unit/test_a.py: 1 of 2 passed",
        "tests/unit/test_b.py: 0 of 1 passed",
    ]


def test_a_gpu_too_small_for_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "memory", lambda: 80 << 30)
    assert learner.layers() == 4
    monkeypatch.setattr(networks, "memory", lambda: 24 << 30)
    with pytest.raises(
        Absent,
        match=r"one layer, embedding and head take 23 GB .* more than half of the GPU's 26 GB",
    ):
        learner.layers()


def test_parts_of_several_runs_are_one_table(
    modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of one machine and commit stand together;
    another's are not mixed with them.
    """

    def measure(*names: str) -> list[str]:
        parts = {name: Part(f"part_{name}", 60) for name in names}
        benchmark.measure(parts, time.monotonic() + 600, True, tmp_path / "out")
        return sorted(
            path.name.removeprefix("gpu-")[11:] for path in (tmp_path / "out").glob("*.json")
        )

    def said() -> dict[str, tuple[str, int]]:
        (path,) = (tmp_path / "out").glob("*-cpu.json")
        parts = json.loads(path.read_text())["parts"]
        return {part["part"]: (part["ending"], len(part["rows"])) for part in parts}

    facts = machine.facts(tiny=True)
    monkeypatch.setattr(machine, "facts", lambda tiny: facts)
    assert measure("well", "raises") == ["cpu.json"]
    assert measure("raises", "absent") == ["cpu.json"]
    assert list(said().items()) == [
        ("well", ("measured", 1)),
        ("raises", ("failed", 1)),
        ("absent", ("absent", 1)),
    ]
    monkeypatch.setitem(facts, "commit", "another")
    assert measure("well") == ["cpu-2.json", "cpu.json"]
    assert len(said()) == 3


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA T4", None),
    ],
)
def test_the_datasheet_of_a_gpu(name: str, known: str | None) -> None:
    found = networks.known(name)
    assert (found and found.name) == known


def test_steps_that_were_trained_twice() -> None:
    losses = [(0, 0.5), (1, 0.25), (2, 0.75), (1, 0.25), (2, 0.5), (3, 1.0)]
    count, largest = run.again(
        [{"step": step, "loss": loss, "empty": 0.0} for step, loss in losses], ""
    )
    assert (count.figure, largest.figure) == (2, 0.25)


def causes(dtype: str) -> set[str]:
    return {
        f"{dtype}, {cause}: mean difference of a log-prob"
        for cause in ("kernels", "decode", "total")
    }


WHATS = {
    "publication": {
        "publications 1 to 3, checksums equal: the server stands still, median",
        "publications 4 to 6, checksums equal: the server stands still, median",
    },
    "parity": causes("bf16") | causes("fp16"),
    "server": {"megarl's client, streamed, overlap", "megarl's client, streamed, no overlap"},
    "run": {
        "steps that trained",
        "from the kill to the next new step",
        "steps trained again after the kill",
    },
}
"""Some rows of each of these parts. test_whole of tests/parallel has the others."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", WHATS)
def test_part(name: str) -> None:
    """At its tiny size, with the real SGLang."""
    outcome = process.run(name, PARTS[name].module, 800, tiny=True)
    assert (outcome.ending, outcome.why) == ("measured", ""), outcome.log
    rows = {row.what: row for row in outcome.rows}
    assert rows.keys() >= WHATS[name]
    assert all(row.figure >= 0 for row in outcome.rows if not row.what.startswith("reward_mean"))
    if name == "publication":
        assert "for there is no GPU and so no CUDA IPC" in outcome.rows[0].sizes
        assert [len(raw["publications"]) for raw in outcome.raw] == [3, 3]
    if name == "run":
        assert rows["steps that trained"].figure == rows["steps that trained"].reference_figure
        assert rows["steps that trained"].figure >= run.KILLED + run.AFTER
        assert rows["steps trained again after the kill"].figure >= run.KILLED - run.SAVED
        assert rows["their loss: largest difference"].figure == 0
    if name == "parity":
        for dtype in ("bf16", "fp16"):
            assert (rows[f"{dtype}, kernels: mean difference of a log-prob"].ratio or 0) < 1


@pytest.mark.slow
def test_fp8_is_compared_with_bf16_and_refused_without_transformer_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With bf16 in place of a format that needs a GPU: nothing may differ."""
    (tmp_path / "part_fp8.py").write_text(
        'from benchmarks.gpu.parts import fp8\nfp8.FORMATS = ("none", *fp8.FORMATS)\nrows ='
        " fp8.rows\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    outcome = process.run("fp8", "part_fp8", 120, tiny=True)
    assert (outcome.ending, outcome.why) == ("measured", ""), outcome.log
    rows = {row.what: row for row in outcome.rows}
    assert len(rows) == 6
    assert rows["none to bf16: largest"].figure == 0
    assert rows["none: gradient's norm"].ratio == 1
    for kind, said in zip(fp8.FORMATS, outcome.remarks, strict=True):
        assert said.startswith(f"model.fp8: {kind} needs Transformer Engine")


FORGETS = """
import tempfile, weakref
from pathlib import Path
from benchmarks.gpu import networks

def rows(tiny):
    for dtype in ("fp32", "bf16"):
        with tempfile.TemporaryDirectory() as folder:
            config = networks.llama_8b(**networks.TINY, num_hidden_layers=1)
            trainer = networks.trainer_of(networks.recipe_of(config, Path(folder), {"model": {"dtype": dtype}}))
            trainer.train_step(networks.sequences([64], config["vocab_size"]))
            held = [weakref.ref(p) for chunk in trainer.policy.chunks for p in chunk.parameters()]
        del trainer
        networks.forget()
        yield f"{dtype}: {sum(each() is not None for each in held)}"
"""


def test_a_model_leaves_its_memory_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several parts have several models, of which a GPU may hold one."""
    (tmp_path / "part_forgets.py").write_text(FORGETS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    outcome = process.run("forgets", "part_forgets", 120, tiny=True)
    assert (outcome.ending, outcome.remarks) == ("measured", ["fp32: 0", "bf16: 0"]), outcome.log


def test_without_time_left(modules: Path, tmp_path: Path) -> None:
    (outcome,) = benchmark.measure(
        {"well": Part("part_well", 60)}, time.monotonic() + 5, True, tmp_path
    )
    assert (outcome.ending, outcome.why[1:]) == ("not run", " s were left")
    assert "| well | not run |" in next(tmp_path.glob("*.md")).read_text()


def test_the_table_says_what_was_measured_on() -> None:
    facts = machine.facts(tiny=True)
    assert {"torch", "megatron-core", "transformer-engine", "sglang", "nvidia-cudnn-cu13"} <= set(
        facts["versions"]
    )
    facts |= {"gpu": "NVIDIA H200", "driver": "580.1", "cuda": "13.0", "commit": "unknown"}
    assert machine.slug(facts) == "NVIDIA-H200"
    table = report.markdown(
        "2026-11-22", facts, [Outcome("head", "measured", rows=[Row("time", 12345.6, "ms", "")])]
    )
    assert table.startswith("# NVIDIA H200, 2026-11-22\n\nDriver 580.1, CUDA 13.0, Python 3.12")
    assert "Commit unknown." in table
    assert "Of the stack" not in table
    assert "| head | time | 12,346 ms |  |  |  |" in table


def test_wheels_are_those_of_the_stack() -> None:
    pinned = (ROOT / "requirements" / "cpu.txt").read_text().splitlines()
    wheels = [
        line
        for line in (RUN.parent / "wheels.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    assert wheels
    assert [line for line in wheels if line not in pinned] == []


IMPORTS = """
import importlib, importlib.abc, importlib.metadata, importlib.util, json, pkgutil, sys
absent = set(json.loads(sys.argv[1]))
real = importlib.util.find_spec

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

importlib.util.find_spec = lambda name, *more: None if name.partition(".")[0] in absent else real(name, *more)
sys.meta_path.insert(0, Absent())
for name in sys.argv[2:]:
    importlib.import_module(name)
"""


def test_nothing_else_is_imported() -> None:
    """By any part, and by the tests marked gpu."""

    def project(line: str) -> str:
        """A requirement's or distribution's name, as PyPI compares it."""
        found = re.match(r"[\w.-]*", line)
        return re.sub(r"[-_.]+", "-", found.group() if found else "").lower()

    have = {project(line) for line in (RUN.parent / "wheels.txt").open()} | {"megarl"}
    torchs = ["torch"]
    while torchs:
        have.add(name := torchs.pop())
        needs = [project(line) for line in metadata.requires(name) or [] if "extra ==" not in line]
        torchs += [other for other in needs if other not in have and not other.startswith("nvidia")]
    others = {project(line) for line in (ROOT / "requirements" / "cpu.txt").open()} - have
    absent = [
        m
        for m, names in metadata.packages_distributions().items()
        if {project(name) for name in names} <= others
    ]
    assert "scipy" in absent
    marked = [
        path
        for path in (ROOT / "tests").rglob("*.py")
        if re.search(r"mark\.gpu\b", path.read_text())
    ]
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in marked]
    modules += [
        f"benchmarks.gpu.parts.{path.stem}" for path in (RUN.parent / "parts").glob("[a-z]*.py")
    ]
    assert len(modules) > 10
    words = [sys.executable, "-W", "ignore", "-c", IMPORTS, json.dumps(absent), *sorted(modules)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]


def run_sh(tmp_path: Path, torch: str, *words: str) -> subprocess.CompletedProcess[str]:
    """run.sh with a Python whose torch says that it is of this version."""
    (tmp_path / "torch.py").write_text(f'__version__ = "{torch}"\n')
    environment = {
        "PATH": "/usr/bin:/bin",
        "MEGARL_PYTHON": sys.executable,
        "PYTHONPATH": str(tmp_path),
    }
    return subprocess.run(
        [RUN, *words], env=environment, capture_output=True, text=True, timeout=120
    )


def test_no_python_that_can(tmp_path: Path) -> None:
    done = run_sh(tmp_path, "2.10.0", "--tiny")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "run.sh: no Python >= 3.12 with torch >= 2.11 (say which: MEGARL_PYTHON=/path/to/python); "
    )
    assert (
        f"{sys.executable} is Python 3.{sys.version_info[1]}.{sys.version_info[2]}, torch 2.10.0"
        in line
    )


def test_wheels_are_installed_beside_what_is_there(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    venv = tmp_path / "venv"
    out = tmp_path / "out"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "made_up-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("made_up.py", "")
        wheel.writestr(
            "made_up-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: made-up\nVersion: 1.0\n"
        )
        wheel.writestr(
            "made_up-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr("made_up-1.0.dist-info/RECORD", "")
    words = [
        "--tiny",
        "--wheels",
        str(wheels),
        "--venv",
        str(venv),
        "--minutes",
        "0.001",
        "--output",
        str(out),
    ]
    done = run_sh(tmp_path, "2.11.0+cu130", *words)
    assert done.returncode == 1, done.stderr  # no part was run
    (text,) = out.glob("*.json")
    assert {part["ending"] for part in json.loads(text.read_text())["parts"]} == {"not run"}
    look = "import made_up, pytest; print(made_up.__file__, pytest.__file__)"
    seen = subprocess.run(
        [venv / "bin" / "python", "-c", look], capture_output=True, text=True, check=True
    )
    new, old = seen.stdout.split()
    assert new.startswith(str(venv))
    assert os.path.samefile(old, pytest.__file__)


def test_programs_beside_the_python_are_found(tmp_path: Path) -> None:
    seen = tmp_path / "path"
    (tmp_path / "sitecustomize.py").write_text(
        f"import os; open({str(seen)!r}, 'w').write(os.environ['PATH'])\n"
    )
    run_sh(tmp_path, "2.11.0", "--tiny", "--minutes", "0.001", "--output", str(tmp_path / "out"))
    assert str(Path(sys.executable).parent) in seen.read_text().split(":")


def test_words_that_it_does_not_know(tmp_path: Path) -> None:
    assert "--weels: unknown" in run_sh(tmp_path, "2.11.0", "--weels").stderr
    assert (
        "no *.whl there" in run_sh(tmp_path, "2.11.0", "--tiny", "--wheels", str(tmp_path)).stderr
    )
