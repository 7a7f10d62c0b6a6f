"""`megarl train`: the roles as processes. Nothing here imports a role.

checks.py     everything that can be wrong before a process is started; inputs.py reads what it is given, and knows it again
train.py      starts the roles, watches, restarts, ends the run; exit status
nodes.py      what a node has: address, GPUs, free ports; devices.py asks for the GPUs
placement.py  which role on which node and GPUs: pure
launcher.py   how a role is started, watched and ended: the seam, and local processes
srun.py       the same by steps of a Slurm job; step.py is its hand on the node
restart.py    what to do when a role dies: a pure state machine
watch.py      roles that live and do not move
observe.py    what the run's files say now
view.py       the live view of that, and the plain line for logs; screen.py puts them where they go
closing.py    the end of a run, seen
planned.py    `megarl train --plan`: the split of a machine by the plan
cli.py        `megarl status` (status.py), `megarl logs` (logs.py), `megarl submit` (submit.py)
"""
