"""The tools around a run: those used before it, after it, or beside it.

eval/           `megarl eval`
report/         `megarl report` and `megarl trace`
inspection/     shows rollouts and data
monitoring/     metrics writers: TensorBoard, W&B, Prometheus
sft.py          `megarl sft`: the warm start
submit.py       `megarl submit`: a Slurm job
jobset.py       a run on Kubernetes, for `megarl submit --kubernetes`
new_recipe.py   `megarl recipes new`
"""
