"""The tools around a run: those used before it, after it, or beside it.

preflight.py  reads a run's inputs in full before anything starts      dry_run.py   what `--dry-run` shows, and warnings
evaluation/   `megarl eval`            planning/   `megarl plan`         scaling/     `megarl scaling`, forecasts
study/        `megarl study`           report/     report and trace      inspection/  shows rollouts and data
monitoring/   metrics writers: TensorBoard, W&B, Prometheus
sft.py        `megarl sft`             submit.py   `megarl submit`       new_recipe.py   `megarl recipes new`
jobset.py     a run on Kubernetes, for `megarl submit --kubernetes`
doctor.py     `megarl doctor`          pictures.py   shared by all pages and figures
"""
