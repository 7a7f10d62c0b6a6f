"""The project's tests that need a GPU. Only files that have some are read, for others need more than is installed here."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu.rows import Absent, Row, Said

ROOT = Path(__file__).parents[3]


def rows(tiny: bool) -> Iterator[Said]:
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "pytest.mark.gpu" in path.read_text()]
    if not files:
        raise Absent("no test is marked gpu")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = [
            "-m",
            "gpu",
            "-q",
            "-p",
            "no:cacheprovider",
            "--continue-on-collection-errors",
            f"--rootdir={ROOT}",
            f"--junitxml={report}",
        ]
        status = subprocess.run([sys.executable, "-m", "pytest", *options, *map(str, files)], cwd=ROOT).returncode
        if not report.exists():
            raise RuntimeError(f"pytest ended with status {status} and no report")
        cases = list(ElementTree.parse(report).iter("testcase"))
    ended = {
        case: next((child for child in case if child.tag in ("failure", "error", "skipped")), None) for case in cases
    }
    bad = {case: end for case, end in ended.items() if end is not None and end.tag != "skipped"}
    skipped = [end.get("message", "") for end in ended.values() if end is not None and end.tag == "skipped"]
    passed = len(cases) - len(bad) - len(skipped)
    yield Row("passed", passed, "tests", f"{len(files)} files", "marked gpu", len(cases))
    for reason in sorted(set(skipped)):
        yield f"{skipped.count(reason)} skipped: {reason}"
    for case, end in bad.items():
        yield f"{case.get('name')}: {(end.get('message') or end.tag).splitlines()[0]}"
    if bad:
        raise RuntimeError(f"{len(bad)} of {len(cases)} tests failed")
    if status not in (0, 5):
        raise RuntimeError(f"pytest ended with status {status}")
