"""Compares the planner with published clusters: training, serving, publication and
whole steps on other people's GPUs.

    python -m benchmarks.public_clusters [--rows FOLDER] [--keep] [--json FILE]
    [--picture FILE]

    rows ─► rules for leaving out rows ─► the planner's own functions (public/cases.py)
        fit       efficiencies of each kind of GPU, on all models but one
                  ─► that model's rows are predicted
        figures   errors of these predictions, by file, kind of GPU and engine; ranking
                  of layouts; the worst; a picture

It prints the values for hardware.yaml. --rows: another folder with train.csv,
serve.csv, sync.csv, rl_steps.csv with the same columns; --keep: put the rows and
columns that are used into benchmarks/public/, which says where the rows come from.
"""

import argparse
import csv
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.public.cases import FILES, HERE, Case, RowLeftOut, cases_of
from megarl.core.telemetry.pictures import COLORS, GREY, drawing, rendered
from megarl.predict.planning.hardware import GPUS, Gpu

RESULTS = Path(__file__).parent / "results"
EFFICIENCIES = np.geomspace(0.15, 0.95, 32)  # 6 % apart
SECONDS = {
    "expert_layer_s": np.geomspace(0.002, 0.0088, 8),
    "decode_expert_layer_s": np.geomspace(4e-5, 2.4e-4, 8),
}
"""A layer's minimum cannot exceed the quickest published value: 8.8 ms, for
Qwen3-30B-A3B with micro-batches of 4,096.
"""
KINDS_DIFFER = 0.2
MODELS_DIFFER = 0.15
"""Scales, as logarithms. Efficiencies of kinds of GPU are assumed normal about that of
all kinds, models' errors Laplacian.
"""
TIE = 0.05  # published costs closer than this are not ranked, since repeated runs differ as much
COLUMNS = {
    "": "id source_repo source_path source_commit source_row row_status model gpu_kind notes",
    "train": (
        "gpus_total global_batch max_seq_len precision_train tp pp cp ep vpp micro_batch recompute"
        " engine task n_layers step_s tokens_per_s_per_gpu peak_mem_gib check_ratio"
    ),
    "serve": (
        "gen_tp engine dataset num_prompts max_concurrency mean_input_len mean_output_len"
        " output_tok_s speculative"
    ),
    "sync": "gpus_total gpus_gen pp gen_tp method sync_s_low sync_s_high bucket",
    "rl_steps": (
        "gpus_total gpus_train gpus_gen colocated async_lag prompts_per_step gens_per_prompt"
        " max_seq_len mean_gen_len precision_train precision_rollout tp pp cp ep vpp gen_tp"
        " micro_batch recompute engine step_s recipe_vllm_gpu_mem_util"
        " check_implied_tokens_per_rollout"
    ),
}
FIGURES = {"training": "train", "generation": "serve", "publication": "sync"}  # of a plan
Fitted = dict[str, dict[str, float]]
"""The section `fitted` of hardware.yaml: by kind of GPU, and "general"."""
Known = dict[tuple[int, float | None], np.ndarray]
"""A cache of log_errors by a case's id and BF16's efficiency, so that no two fits
compute the same.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, default=HERE)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--json", type=Path, default=RESULTS / "public_clusters.json")
    parser.add_argument("--picture", type=Path, default=RESULTS / "public_clusters.png")
    options = parser.parse_args()
    cases, left_out = read(options.rows)
    if options.keep:
        keep(cases)
    known: Known = {}
    predicted = held_out(cases, known)
    fitted = fit(cases, known)
    found = {"left_out": left_out, "fitted": fitted, **figures(cases, predicted)}
    options.json.write_text(json.dumps(found, indent=1) + "\n")
    draw(cases, predicted, options.picture)
    print(table(found))
    known = {
        kind: {k: float(f"{v:.3g}") for k, v in of.items() if "FSDP" not in k}
        for kind, of in fitted.items()
    }
    errors_of = {figure: found["errors"][file]["median"] for figure, file in FIGURES.items()}
    stated = {"fitted": known, "errors": errors_of, "step_takes": found["step_takes"]}
    print(yaml.safe_dump(stated, sort_keys=False, default_flow_style=None, width=120))


def read(folder: Path) -> tuple[list[Case], dict[str, dict[str, int]]]:
    """Return the cases of the folder's rows, and for each file how many rows are left
    out by each rule.
    """
    cases = []
    left_out = {}
    for file in FILES:
        refused: Counter[str] = Counter()
        with (folder / f"{file}.csv").open() as lines:
            for row in csv.DictReader(lines):
                try:
                    cases.extend(cases_of(file, row))
                except RowLeftOut as reason:
                    refused[str(reason)] += 1
        left_out[file] = dict(refused.most_common())
    return cases, left_out


def keep(cases: Iterable[Case]) -> None:
    """Write the rows of these cases, with only the columns that are read."""
    for file in FILES:
        with (HERE / f"{file}.csv").open("w", newline="") as lines:
            writer = csv.DictWriter(
                lines,
                [*COLUMNS[""].split(), *COLUMNS[file].split()],
                extrasaction="ignore",
                lineterminator="\n",
            )
            writer.writeheader()
            writer.writerows(case.row for case in cases if case.file == file)


# Fitting.


def with_fitted(case: Case, fitted: Fitted) -> Gpu:
    """Return the case's GPU with these efficiencies; FSDP engines have their own, which
    hardware.yaml does not keep.
    """
    values = fitted.get("general", {}) | fitted.get(case.kind, {})
    own = {
        key: values[f"FSDP {key}"]
        for key in ("training", "fp8_training")
        if f"FSDP {key}" in values and "FSDP" in case.engine
    }
    return replace(GPUS[case.kind], **{k: v for k, v in values.items() if "FSDP" not in k} | own)


def log_errors(case: Case, gpu: Gpu) -> np.ndarray:
    """Return |log(planned / published)| [seconds, seconds, efficiencies], for each of
    the values among which fits choose.

    An axis that does not matter has one element.
    """
    share = case.fitted[0].removeprefix("FSDP ")
    axes = [
        [(k, float(x)) for x in values] if k in case.fitted else [(k, getattr(gpu, k))]
        for k, values in SECONDS.items()
    ]
    gpus = (
        replace(gpu, **{share: float(x)} | dict(rest))
        for *rest, x in itertools.product(*axes, EFFICIENCIES)
    )
    planned = np.array([case.seconds(each) for each in gpus]).reshape(*map(len, axes), -1)
    return np.abs(np.log(planned / case.value))


def fit(cases: Sequence[Case], known: Known) -> Fitted:
    """Return the values with the least mean of |log(planned / published)|, in which all
    models of a kind of GPU count equally.

    Rows without FP8 are fitted first, because attention and head use BF16 in FP8 rows,
    too.
    """
    fitted = [case for case in cases if case.fitted]
    return _fit(
        fitted, known, _fit([case for case in fitted if "fp8" not in case.fitted[0]], known, {})
    )


def _fit(cases: Sequence[Case], known: Known, before: Fitted) -> Fitted:
    """Return a general efficiency, one for each kind of GPU that is shrunk towards it,
    and common seconds of a layer.
    """
    loss: dict[tuple[str, str], dict[str, list[np.ndarray]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for case in cases:
        gpu = with_fitted(case, before)
        key = (
            id(case),
            gpu.training if "fp8" in case.fitted[0] else None,
        )  # nothing else in it matters
        if key not in known:
            known[key] = log_errors(case, gpu)
        loss[case.fitted[0], case.kind][case.model].append(known[key])
    sums = {key: sum(np.mean(of, 0) for of in models.values()) for key, models in loss.items()}
    together: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(1))
    for (share, _), of in sums.items():
        together[share] = together[share] + of
    distance = (
        np.log(EFFICIENCIES[:, None] / EFFICIENCIES) ** 2 / 2 / KINDS_DIFFER**2 * MODELS_DIFFER
    )
    # For each choice of seconds the best general efficiencies; around them the best of
    # each kind.
    drawn = {key: of + distance[together[key[0]].argmin(-1)] for key, of in sums.items()}
    total = sum(of.min(-1) for of in drawn.values())
    best = np.unravel_index(np.argmin(total), total.shape)
    at = lambda of: of[tuple(i if n > 1 else 0 for i, n in zip(best, of.shape[:-1], strict=True))]  # noqa: E731
    general = {share: float(EFFICIENCIES[at(of).argmin()]) for share, of in together.items()}
    found = {
        "general": (
            general | {k: float(v[i]) for (k, v), i in zip(SECONDS.items(), best, strict=True)}
        )
    }
    for (share, kind), of in drawn.items():
        found.setdefault(kind, {})[share] = float(EFFICIENCIES[at(of).argmin()])
    return found


def held_out(cases: Sequence[Case], known: Known) -> list[float]:
    """Return the planner's value for each case, with values fitted only to the other
    models.
    """
    fitted = {
        model: fit([c for c in cases if c.model != model], known)
        for model in {c.model for c in cases}
    }
    return [case.seconds(with_fitted(case, fitted[case.model])) for case in cases]


# Figures.


def figures(cases: Sequence[Case], predicted: Sequence[float]) -> dict[str, Any]:
    """Return errors by file and by kind of GPU and engine, the ranking of layouts, the
    worst rows, and all rows.
    """
    groups: dict[tuple[str, ...], list[tuple[Case, float]]] = defaultdict(list)
    for case, planned in zip(cases, predicted, strict=True):
        groups[case.file,].append((case, planned))
        groups[case.file, case.kind, case.engine].append((case, planned))
    worst = sorted(
        zip(cases, predicted, strict=True), key=lambda pair: -abs(np.log(pair[1] / pair[0].value))
    )
    return {
        "errors": {" | ".join(key): _errors(groups[key]) for key in sorted(groups)},
        "ranking": {
            "training, Megatron": ranking(p for p in groups["train",] if "FSDP" not in p[0].engine),
            "training, with FSDP, whose sharding the planner has not": ranking(groups["train",]),
            "whole steps": ranking(groups["rl_steps",]),
        },
        "step_takes": taken(groups["rl_steps",]),
        "worst": [_shown(case, planned) for case, planned in worst[:10]],
        "rows": [_shown(case, planned) for case, planned in zip(cases, predicted, strict=True)],
    }


def _shown(case: Case, planned: float) -> dict[str, object]:
    names: dict[str, object] = {
        "file": case.file,
        "id": case.row["id"],
        "model": case.model,
        "gpu": case.kind,
        "engine": case.engine,
    }
    return names | {"published": round(case.value, 3), "planned": round(planned, 3)}


def _errors(pairs: Sequence[tuple[Case, float]]) -> dict[str, float]:
    """Return statistics of |planned / published - 1|, and the median of planned /
    published.
    """
    ratios = np.array([planned / case.value for case, planned in pairs])
    error = np.abs(ratios - 1)
    shares = {
        "median": np.median(error),
        "p90": np.quantile(error, 0.9),
        "ratio": np.median(ratios),
    }
    return {"rows": len(pairs), "models": len({c.model for c, _ in pairs})} | {
        k: round(float(v), 3) for k, v in shares.items()
    }


def taken(pairs: Sequence[tuple[Case, float]]) -> list[float]:
    """Return between which multiples of their plan eight of ten cases took."""
    ratios = [case.value / planned for case, planned in pairs]
    return [round(float(np.quantile(ratios, share)), 2) for share in (0.1, 0.9)]


def ranking(pairs: Iterable[tuple[Case, float]]) -> dict[str, float]:
    """Return Kendall's tau of GPU-seconds per sequence or step, over pairs of layouts
    with the same model, work and GPU.

    Rows with the same layout count as one, with their geometric mean. Pairs whose
    published costs differ by less than TIE are left out.
    """
    costs: dict[tuple[object, ...], dict[tuple[object, ...], list[tuple[float, float]]]] = (
        defaultdict(lambda: defaultdict(list))
    )
    for case, planned in pairs:
        logs = float(np.log(case.value * case.share)), float(np.log(planned * case.share))
        costs[case.model, case.kind, case.rival][case.layout].append(logs)
    signs = []
    for layouts in costs.values():
        means = [np.mean(rows, 0) for rows in layouts.values()]
        signs += [
            float(np.prod(np.sign(a - b)))
            for a, b in itertools.combinations(means, 2)
            if abs(a - b)[0] > TIE
        ]
    return {"pairs": len(signs), "tau": round(float(np.mean(signs)), 3) if signs else 0.0}


def table(found: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    heads = (
        "rows of",
        "kind of GPU, engine",
        "rows",
        "models",
        "half are nearer than",
        "nine of ten",
        "planned / published",
    )
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for key, e in found["errors"].items():
        file, _, rest = key.partition(" | ")
        shares = f"{e['median']:.0%} | {e['p90']:.0%} | {e['ratio']:.2f}"
        lines.append(
            f"| {file} | {rest.replace(' | ', ', ') or 'all'} | {e['rows']} | {e['models']} |"
            f" {shares} |"
        )
    lines += ["", "| worst | model | GPU | published | planned |", "|---|---|---|---|---|"]
    for w in found["worst"]:
        lines.append(
            f"| `{w['id']}` | {w['model']} | {w['gpu']} | {w['published']:,.4g} |"
            f" {w['planned']:,.4g} |"
        )
    lines += [
        "",
        *(
            f"- {what}: tau {r['tau']:.2f} of {r['pairs']} pairs"
            for what, r in found["ranking"].items()
        ),
        "",
    ]
    return "\n".join(
        lines
        + [
            f"- {file}: {reason}: {n}"
            for file, of in found["left_out"].items()
            for reason, n in of.items()
        ]
    )


def draw(cases: Sequence[Case], predicted: Sequence[float], path: Path) -> None:
    """Draw planned against published values, with one panel per file."""
    from matplotlib.ticker import LogLocator

    titles = {
        "train": "training step, s",
        "rl_steps": "whole step of RL, s",
        "serve": "serving run, s",
        "sync": "publication, s",
    }
    with drawing((11, 10), 2, 2) as (figure, axes):
        for ax, (file, title) in zip(axes, titles.items(), strict=True):
            points = [(c, p) for c, p in zip(cases, predicted, strict=True) if c.file == file]
            values = [v for c, p in points for v in (c.value, p)]
            ends = np.array([min(values) / 1.3, max(values) * 1.3])
            ax.fill_between(
                ends,
                ends / 1.5,
                ends * 1.5,
                color=GREY,
                alpha=0.12,
                linewidth=0,
                label="within 1.5 times",
            )
            ax.plot(ends, ends, color=GREY, linewidth=1)
            for kind, colour in zip(sorted({c.kind for c, _ in points}), itertools.cycle(COLORS)):
                mine = [(c.value, p) for c, p in points if c.kind == kind]
                ax.plot(
                    *zip(*mine, strict=True), "o", color=colour, markersize=4, alpha=0.7, label=kind
                )
            ax.set(
                xscale="log",
                yscale="log",
                xlim=ends,
                ylim=ends,
                title=title,
                xlabel="published",
                ylabel="planned, model held out",
            )
            for axis in (ax.xaxis, ax.yaxis):
                axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axis.set_major_formatter("{x:g}")
                axis.set_minor_formatter("")
            ax.legend(loc="upper left")
        path.write_bytes(rendered(figure, "png", dpi=110))


if __name__ == "__main__":
    main()
