"""`megarl train`: the roles as processes. Nothing here imports a role.

checks.py     everything that can be wrong before a process is started
train.py      starts the roles, watches, restarts, ends the run; exit status
launcher.py   how a role is started and ended: the seam, and local processes
devices.py    which GPUs there are and who gets which
restart.py    what to do when a role dies: a pure state machine
watch.py      roles that live and do not move
observe.py    what the run's files say now
view.py       the live view of that, and the plain line for logs
"""
