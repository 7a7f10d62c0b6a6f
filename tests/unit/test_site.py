"""docs/ builds as a site: no link, anchor or page is missing, and a browser fetches
nothing from elsewhere.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[2]
FETCHED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"?https?:[^>]*>")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make docs` does, elsewhere."""
    built = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(built)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return built


def test_a_browser_fetches_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    assert [
        (page.name, found) for page in pages for found in FETCHED.findall(page.read_text())
    ] == []
    assert FETCHED.findall('<link rel="stylesheet" href="https://fonts.example/a.css">')


def test_files_of_the_repository_are_pages(site: Path) -> None:
    link = 'href="../repository/megarl/core/evaluation/parity.py.html"'
    assert link in (site / "how-to/monitoring.html").read_text()
    assert "ParityLimits" in (site / "repository/megarl/core/evaluation/parity.py.html").read_text()


def test_the_api_is_shown(site: Path) -> None:
    page = (site / "reference/api.html").read_text()
    for name in ("megarl.environments.Environment", "reply_tokens", "sequence_mean", "hours_to"):
        assert name in page


def test_search_finds_pages_and_not_files_of_the_repository(site: Path) -> None:
    index = (site / "search/search_index.json").read_text()
    assert '"location":"how-to/when-it-goes-wrong.html"' in index
    assert '"location":"repository/' not in index
