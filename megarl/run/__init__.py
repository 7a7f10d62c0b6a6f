"""`megarl train`: the supervisor and the role processes. Nothing here imports a role, a
task or the lab.

train.py      starts and watches the roles, restarts them, ends the run with an exit status
checks.py     validates where and how a run starts                   prepare.py   writes the files that the roles read first
fork.py       a run that begins at a checkpoint of another   join.py      an additional server for a running run
nodes.py      a node's address, GPUs and free ports                  devices.py   finds the GPUs
placement.py  assigns roles to nodes and GPUs (pure)
launcher.py   starts, watches and ends a role: the interface, and local processes
srun.py       the same with steps of a Slurm job                     step.py      the part that runs on the node
pods.py       the same in the pods of a Kubernetes JobSet
restart.py    decides what to do when a role dies: a pure state machine   watch.py     finds roles that are alive but stuck
observe.py    reads the current state from the run's files           view.py      the live view of that state
closing.py    the end of a run, on screen and on disk                summary.py   the results of a run
process.py    signals, locks and ports of a command's process        health.py    judges by the metrics whether a run is healthy
scores.py     the best and the last held-out score, and what they warn of
status.py     `megarl status`, `megarl health`                      logs.py      `megarl logs`
"""
