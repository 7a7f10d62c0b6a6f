"""Pictures are written, and the page needs no network."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from megarl.core.base.errors import MegarlError
from megarl.core.telemetry.pictures import drawing, logarithmic
from megarl.predict.scaling.fit import fit
from megarl.predict.scaling.plot import Series, plot_efficiency, plot_fits
from megarl.predict.scaling.points import Curve
from megarl.predict.scaling.published import law_named
from tests.pages import Resources, asks_the_network
from tests.unit.predict.scaling.curves import HOURS, noisy

NAME = "a </script> & <b>"


@pytest.fixture(scope="module")
def series() -> Series:
    curve = noisy(0.61, 1.92, 2542)
    short = Curve("short", HOURS[:2], np.array([0.3, 0.4]), 0.3)
    return {NAME: ([curve], fit([curve], end=8000)), "short": ([short], None)}


def test_png_and_svg(series: Series, tmp_path: Path) -> None:
    png, svg, _ = plot_fits(series, tmp_path / "run.v1", laws=[law_named("scalerl-8b")])
    assert png.name == "run.v1.png"
    assert png.read_bytes().startswith(b"\x89PNG")
    text = svg.read_text()
    for shown in (
        "A 0.",
        "C_mid",
        "GPU-hours",
        "short: no fit",
        "scalerl-8b (published",
    ):
        assert shown in text


def test_efficiency(series: Series, tmp_path: Path) -> None:
    found = series[NAME][1]
    assert found is not None
    _, svg = plot_efficiency({"mine": found}, tmp_path / "efficiency")
    assert f"slope B = {found.B:.2f}" in svg.read_text()


def test_page_opens_offline(series: Series, tmp_path: Path) -> None:
    text = plot_fits(series, tmp_path / "page", laws=[law_named("scalerl-8b")])[2].read_text()
    page = Resources(text)
    assert (page.found, len(page.scripts)) == ([], 1)
    assert not asks_the_network(text)
    assert "the axis starts at" in text
    data = json.loads(re.search(r"^const DATA = (.*);$", text, re.MULTILINE)[1])  # type: ignore[index]
    first, short = data["series"]
    found = series[NAME][1]
    assert found is not None
    assert first["name"] == NAME
    assert first["fit"] == found.record()
    assert sum(inside for _, _, inside, _ in first["points"]) == found.n
    assert (short["fit"], len(short["points"])) == (None, 2)
    assert data["laws"][0]["curve"]


def test_core_hours_are_not_laid_over_gpu_hours(tmp_path: Path) -> None:
    curve = Curve("x", HOURS, np.linspace(0.3, 0.5, 32), 0.3, "core")
    with pytest.raises(MegarlError, match="cannot be drawn with"):
        plot_fits({"x": ([curve], None)}, tmp_path / "x", laws=[law_named("scalerl-8b")])


def test_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(MegarlError, match="nothing to draw"):
        plot_fits({"x": ([Curve("x", np.zeros(0), np.zeros(0), 0.3)], None)}, tmp_path / "x")


@pytest.mark.parametrize(
    ("ends", "labels"),
    [
        ((1.5, 33.0), ["2", "5", "10", "20"]),
        ((0.9, 110_000.0), ["1", "10", "100", "1,000", "10,000", "100,000"]),
    ],
)
def test_logarithms_are_labelled_by_plain_numbers(
    ends: tuple[float, float], labels: list[str]
) -> None:
    with drawing((6, 4)) as (figure, (axes,)):
        axes.plot(ends, (0.0, 1.0))
        axes.set_xlim(ends)
        logarithmic(axes)
        figure.draw_without_rendering()
        shown = [label.get_text() for label in axes.get_xticklabels()]
    assert shown[1:-1] == labels  # the first and the last lie outside
    assert not any(label.get_text() for label in axes.get_xticklabels(minor=True))
