"""Runs the project's tests that need a GPU. Only files with such tests are read, since
others need more than is installed here.

Passed tests are reported file by file, so that the others are known if one hangs.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu.rows import Absent, Row, Said

ROOT = Path(__file__).parents[3]
ENDED = re.compile(r"(\S+\.py)::.* (PASSED|FAILED|ERROR|SKIPPED)\b")
"""A line of `pytest -v`."""


def rows(tiny: bool) -> Iterator[Said]:
    files = [
        path
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "pytest.mark.gpu" in path.read_text()
    ]
    if not files:
        raise Absent("no test is marked gpu")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = [
            "-m",
            "gpu",
            "-v",
            "-p",
            "no:cacheprovider",
            "--continue-on-collection-errors",
            f"--rootdir={ROOT}",
            f"--junitxml={report}",
        ]
        words = [sys.executable, "-m", "pytest", *options, *map(str, files)]
        with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as pytest:
            assert pytest.stdout is not None
            yield from passed_by_file(pytest.stdout)
        if not report.exists():
            raise RuntimeError(f"pytest ended with status {pytest.returncode} and no report")
        cases = list(ElementTree.parse(report).iter("testcase"))
    ended = {
        case: next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        for case in cases
    }
    bad = {case: end for case, end in ended.items() if end is not None and end.tag != "skipped"}
    skipped = [
        end.get("message", "") for end in ended.values() if end is not None and end.tag == "skipped"
    ]
    passed = len(cases) - len(bad) - len(skipped)
    yield Row("passed", passed, "tests", f"{len(files)} files", "marked gpu", len(cases))
    for reason in sorted(set(skipped)):
        yield f"{skipped.count(reason)} skipped: {reason}"
    for case, end in bad.items():
        yield f"{case.get('name')}: {(end.get('message') or end.tag).splitlines()[0]}"
    if bad:
        raise RuntimeError(f"{len(bad)} of {len(cases)} tests failed")
    if pytest.returncode not in (0, 5):
        raise RuntimeError(f"pytest ended with status {pytest.returncode}")


def passed_by_file(lines: Iterable[str]) -> Iterator[str]:
    """Yield a remark when a file of tests is done. lines: pytest's output, which is
    also printed.
    """
    file = ""
    passed = 0
    ended = 0
    for line in lines:
        print(line, end="", flush=True)
        match = ENDED.match(line)
        if match is None:
            continue
        if match[1] != file and ended:
            yield f"{file}: {passed} of {ended} passed"
        if match[1] != file:
            file = match[1]
            passed = 0
            ended = 0
        ended += 1
        passed += match[2] == "PASSED"
    if ended:
        yield f"{file}: {passed} of {ended} passed"
