"""The figures of RUN/summary.json once more, from metrics.jsonl and the other files by
numpy, without megarl's code.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np


def recomputed(run: Path, lag_limit: int) -> dict[str, Any]:
    """All figures of a run of one task; nan where nothing was measured."""
    rows = sorted(
        {row["step"]: row for row in _rows(run / "metrics.jsonl")}.values(),
        key=lambda row: row["step"],
    )
    scores = sorted(
        {row["step"]: row for row in _rows(run / "eval.jsonl")}.values(),
        key=lambda row: row["step"],
    )
    events = _rows(run / "logs" / "supervisor.jsonl")
    lives = [e["time"] for e in events if e["event"] == "started" and e["role"] == "learner-0"]
    times = np.array([row["time"] for row in rows])
    after = [times[times > life].min() for life in lives if (times > life).any()]
    measured = [row for row in rows if not row.get("replay") and row["time"] not in after]
    published = [row for row in measured if "pause_seconds" in row]

    def column(name: str, of: list[dict[str, Any]]) -> Any:
        return np.array(
            [np.nan if row.get(name) is None else row[name] for row in of] or [np.nan], float
        )

    seconds = column("step_seconds", measured)
    busy = column("server_busy_share", measured)
    kernels = column("parity_mean/kernels", rows)
    best = int(np.argmax([row["pass_rate"] for row in scores]))
    return {
        "steps": len(rows),
        "newest_steps": len(rows[-20:]),
        "compute_hours": max(row["compute_hours"] for row in [*rows, *scores]),
        "pass_rate_before": scores[0]["pass_rate"],
        "pass_rate_before_step": scores[0]["step"],
        "pass_rate_best": scores[best]["pass_rate"],
        "pass_rate_best_step": scores[best]["step"],
        "pass_rate_after": scores[-1]["pass_rate"],
        "pass_rate_after_step": scores[-1]["step"],
        "pass_rate_train": np.nanmean(column("pass_rate_train", rows[-20:])),
        "generated_tokens": column("generated_tokens", rows).sum(),
        "tokens_per_second": column("generated_tokens", measured).sum() / seconds.sum(),
        "step_seconds": seconds.mean(),
        "learner_idle_share": column("wait_seconds", measured).sum() / seconds.sum(),
        "server_idle_share": max(0.0, 1 - np.average(busy, weights=seconds)),
        "publications": len(published),
        **{
            f"{p}_seconds": column(f"{p}_seconds", published).mean()
            for p in ("publish", "pause", "transfer", "resume")
        },
        "lag_mean": np.nanmean(column("lag_mean", rows)),
        "lag_max": np.nanmax(column("lag_max", rows)),
        "lag_limit": lag_limit,
        "parity_mean": np.nanmean(kernels),
        "parity_mean_max": np.nanmax(kernels),
        "parity_publications": np.isfinite(kernels).sum(),
        "versions_per_rollout": np.nanmean(column("versions_per_rollout", rows)),
        "truncation_rate": np.nanmean(column("truncation_rate", rows[-20:])),
        "interruption_rate": np.nanmean(column("interruption_rate", rows[-20:])),
        "format_error_rate": np.nanmean(column("format_error_rate", rows[-20:])),
        "void_groups": column("void_groups", rows).sum(),
        "restarts": sum(e["event"] == "restart" for e in events),
    }


WORDS = {
    "run",
    "warnings",
    "steps_planned",
    "compute_unit",
    "predicted",
    "tasks",
    "outcome",
    "reason",
    "wall_seconds",
}
"""Keys of a summary that are not computed from the run's files."""


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
