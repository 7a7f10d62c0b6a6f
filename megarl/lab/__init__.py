"""Around a run: what is done before it, after it, or beside it.

preflight.py  what a run is given, read whole before anything starts
evaluation/   `megarl eval`            planning/   `megarl plan`         scaling/     `megarl scaling`, forecasts
study/        `megarl study`           report/     report and trace      inspection/  rollouts and data, shown
sft.py        `megarl sft`             submit.py   `megarl submit`       presets.py   `megarl recipes suggest`
doctor.py     `megarl doctor`
"""
