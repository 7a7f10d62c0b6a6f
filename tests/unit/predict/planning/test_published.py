"""Published clusters: what is left out, by rule; the fit finds efficiencies that rows
were made with; wrong models show.
"""

import csv
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks import public_clusters
from benchmarks.public.cases import FILES, HERE, Case, RowLeftOut, cases_of, models, shape_of
from benchmarks.public_clusters import fit, held_out, ranking, read
from megarl.predict.planning import show
from megarl.predict.planning.hardware import ERRORS, GPUS, STEP_TAKES

TRAIN = {
    "id": "",
    "row_status": "current",
    "notes": "",
    "model": "Llama 3.1 8b",
    "gpu_kind": "H100",
    "gpus_total": "8",
    "global_batch": "128",
    "max_seq_len": "8192",
    "precision_train": "BF16",
    "tp": "1",
    "pp": "1",
    "cp": "2",
    "ep": "",
    "vpp": "",
    "micro_batch": "1",
    "recompute": "",
    "engine": "NeMo / Megatron-Core",
    "task": "pretrain",
    "n_layers": "",
    "step_s": "12.27",
    "tokens_per_s_per_gpu": "",
    "peak_mem_gib": "",
    "check_ratio": "1.0",
}


def test_rows_are_read_as_the_planner_sees_them() -> None:
    (case,) = cases_of("train", TRAIN)
    assert (case.model, case.kind, case.engine, case.value) == (
        "llama3-8b",
        "h100",
        "Megatron, BF16",
        12.27,
    )
    assert case.seconds(GPUS["h100"]) == pytest.approx(12.27, rel=0.3)
    rate = TRAIN | {"step_s": "", "tokens_per_s_per_gpu": "10000", "peak_mem_gib": "70"}
    seconds, memory = cases_of("train", rate)
    assert seconds.value == pytest.approx(128 * 8192 / 8 / 10_000)
    assert (memory.file, memory.value) == ("memory", 70)
    assert memory.seconds(GPUS["h100"]) == pytest.approx(8.03e9 * (6 + 12 / 8) / 2**30, rel=0.5)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"check_ratio": "1.47"}, "not its tokens a second"),
        ({"check_ratio": "0.8"}, "not its tokens a second"),
        ({"notes": "TRAP: parts do not add up"}, "no consistent measurement"),
        ({"row_status": "historical older-revision"}, "copy of another row"),
        ({"model": "Nemotron_3_Nano"}, "layers are not ones"),
        ({"gpu_kind": "H100, B200"}, "kind of GPU"),
        ({"gpu_kind": "TPU v5"}, "kind of GPU"),
        ({"precision_train": "NVFP4"}, "FP4"),
        ({"precision_train": ""}, "precision"),
        ({"task": "lora"}, "LoRA"),
        ({"micro_batch": ""}, "not stated: micro_batch"),
        ({"pp": "2"}, "not stated: vpp"),
        ({"global_batch": "127"}, "does not divide"),
        ({"gpus_total": "9"}, "do not divide"),
        ({"gpu_kind": "A100", "precision_train": "FP8"}, "has none"),
        ({"model": "Qwen3_30B_a3B"}, "not stated: ep"),
    ],
)
def test_rows_are_left_out_by_rule(changed: dict[str, str], why: str) -> None:
    with pytest.raises(RowLeftOut, match=why):
        cases_of("train", TRAIN | changed)


def test_the_rule_does_not_look_at_the_error() -> None:
    """A row a hundred times too slow is kept."""
    (case,) = cases_of("train", TRAIN | {"step_s": "1227"})
    assert case.value == 1227


def test_all_rows_that_come_with_megarl_are_used_and_say_where_they_are_from() -> None:
    cases, left_out = read(HERE)
    assert not any(left_out.values())
    assert {case.file for case in cases} == set(FILES)
    for file in FILES:
        with (HERE / f"{file}.csv").open() as lines:
            assert all(
                row["source_repo"] and row["source_path"] and row["source_commit"]
                for row in csv.DictReader(lines)
            )


BILLIONS = {
    "grok1-314b": 314,
    "deepseek-v3": 671,
    "kimi-k2": 1026,
    "glm-4.5": 353,
    "glm-4.5-air": 107,
    "minimax-m2": 229,
    "step-3.5-flash": 196,
    "gpt-oss-120b": 117,
    "llama4-maverick": 400,
    "mixtral-8x22b": 141,
    "qwen3-235b-a22b": 235,
    "nemotron4-340b": 341,
    "gpt3-175b": 175,
    "glm-5": 744,
    "moonlight-16b": 16,
    "glm-4.7-flash": 30,
}


@pytest.mark.parametrize("name", models())
def test_models_have_the_published_numbers_of_parameters(name: str) -> None:
    """Those that their names say, or their cards: within 6 %, without layers that
    predict further tokens and norms.
    """
    said = BILLIONS.get(name) or float(
        re.findall(r"-([\d.]+)b", name.replace("llama4-scout", "-108b").replace("8x7b", "-46.7b"))[
            0
        ]
    )
    assert shape_of(name).parameters == pytest.approx(said * 1e9, rel=0.06 if said >= 10 else 0.3)


def synthetic(
    efficiencies: dict[tuple[str, str], float], seconds: float = 0.004, factor: float = 1.0
) -> list[Case]:
    """The committed training rows, with values that the planner has with these
    efficiencies; `factor` on some of them.
    """
    made = []
    for case in read(HERE)[0]:
        if case.file == "train" and "FSDP" not in case.engine:
            shares: dict[str, Any] = {
                share: efficiencies[share, case.kind] for share in ("training", "fp8_training")
            }
            gpu = replace(GPUS[case.kind], expert_layer_s=seconds, **shares)
            made.append(
                case._replace(
                    value=case.seconds(gpu) * (factor if case.model == "llama3-8b" else 1.0)
                )
            )
    return made


@pytest.fixture
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public_clusters, "EFFICIENCIES", np.array([0.3, 0.4, 0.5, 0.6, 0.7]))
    monkeypatch.setattr(
        public_clusters, "SECONDS", {"expert_layer_s": np.array([0.002, 0.004, 0.008])}
    )


def known(**of_h100: float) -> dict[tuple[str, str], float]:
    usual: dict[tuple[str, str], float] = {
        (share, kind): 0.5 for share in ("training", "fp8_training") for kind in GPUS
    }
    return usual | {(share, "h100"): value for share, value in of_h100.items()}


def test_the_fit_recovers_what_rows_were_made_with(coarse: None) -> None:
    cases = synthetic(known(training=0.7, fp8_training=0.4))
    found = fit(cases, {})
    assert found["h100"] == {"training": 0.7, "fp8_training": 0.4}
    assert found["gb200"] == {"training": 0.5, "fp8_training": 0.5}
    assert found["general"]["expert_layer_s"] == 0.004
    planned = held_out(cases, {})
    exact = [
        np.isclose(p, case.value)
        for case, p in zip(cases, planned, strict=True)
        if case.kind == "h100"
    ]
    assert np.mean(exact) > 0.9, "what is held out is planned like the rest"


def test_a_model_that_is_planned_wrongly_shows_when_it_is_held_out(coarse: None) -> None:
    """Rows of one model are twice as slow as the planner says: the others do not
    follow, and its error is a half.
    """
    cases = synthetic(known(), factor=2.0)
    planned = held_out(cases, {})
    wrong = [
        p / case.value for case, p in zip(cases, planned, strict=True) if case.model == "llama3-8b"
    ]
    right = [
        p / case.value for case, p in zip(cases, planned, strict=True) if case.model == "grok1-314b"
    ]
    assert np.allclose(wrong, 0.5)
    assert np.allclose(right, 1.0)


def test_ranks_are_those_of_the_layouts() -> None:
    (case,) = cases_of("train", TRAIN)

    def of(layout: int, published: float, planned: float) -> tuple[Case, float]:
        return case._replace(layout=(layout,), value=published), planned

    assert ranking([of(1, 10, 1), of(2, 20, 2), of(3, 30, 3)]) == {"pairs": 3, "tau": 1.0}
    assert ranking([of(1, 10, 3), of(2, 20, 2), of(3, 30, 1)]) == {"pairs": 3, "tau": -1.0}
    assert ranking([of(1, 10, 1), of(2, 10.2, 2)]) == {
        "pairs": 0,
        "tau": 0.0,
    }, "not told apart by the source"
    assert ranking([of(1, 10, 1), of(1, 30, 1), of(2, 20, 2)])["pairs"] == 1, (
        "rows of one layout are one"
    )


def test_what_the_planner_says_is_what_the_rows_gave() -> None:
    """hardware.yaml has the errors of the results' file."""
    found: dict[str, Any] = public_clusters.json.loads(
        (public_clusters.RESULTS / "public_clusters.json").read_text()
    )
    assert {
        figure: found["errors"][file]["median"] for figure, file in public_clusters.FIGURES.items()
    } == ERRORS
    for kind, of in found["fitted"].items():
        gpu = GPUS.get(kind, GPUS["a100"])  # a kind without rows has what is general
        assert {k: float(f"{v:.3g}") for k, v in of.items() if "FSDP" not in k} == {
            k: getattr(gpu, k) for k in of if "FSDP" not in k
        }
    assert show.error("training") == f"±{ERRORS['training']:.0%}"
    assert tuple(found["step_takes"]) == STEP_TAKES
    ratios = [
        row["published"] / row["planned"] for row in found["rows"] if row["file"] == "rl_steps"
    ]
    inside = [STEP_TAKES[0] <= ratio <= STEP_TAKES[1] for ratio in ratios]
    assert np.mean(inside) == pytest.approx(0.8, abs=0.05)
    assert show.likely(100.0) == (100 * STEP_TAKES[0], 100 * STEP_TAKES[1])
