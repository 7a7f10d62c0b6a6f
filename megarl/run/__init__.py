"""`megarl train`: the supervisor and the roles as processes. Nothing here imports a role, a task or the lab.

train.py      starts the roles, watches, restarts, ends the run; exit status
checks.py     what can be wrong with where and how a run starts      prepare.py   what the roles read before anything else
nodes.py      what a node has: address, GPUs, free ports             devices.py   asks for the GPUs
placement.py  which role on which node and GPUs: pure
launcher.py   how a role is started, watched and ended: the seam, and local processes
srun.py       the same by steps of a Slurm job                       step.py      its hand on the node
restart.py    what to do when a role dies: a pure state machine      watch.py     roles that live and do not move
observe.py    what the run's files say now                           view.py      the live view of that
closing.py    the end of a run, seen                                 summary.py   what it came to
status.py     `megarl status`                                        logs.py      `megarl logs`
"""
