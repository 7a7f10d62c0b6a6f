"""`megarl train`: the supervisor and the role processes. Nothing here imports a role, a
task, the checks or a tool: the command line passes in the checks and the report.

The supervisor:
    train.py      starts and watches the roles, restarts them, ends the run
    prepare.py    writes the files that the roles read first
    fork.py       a run that begins at a step of another
    join.py       an additional server for a running run
    restart.py    decides what to do when a role dies: a pure state machine
    deadline.py   when it must stop, so that its job's time suffices for a checkpoint
    watch.py      finds roles that are alive but stuck
    closing.py    the end of a run, on screen and on disk

Where roles run:
    nodes.py      a node's address, GPUs and free ports
    devices.py    finds the GPUs
    placement.py  assigns roles to nodes and GPUs (pure)
    launcher.py   starts, watches and ends a role: the interface, and local processes
    launchers.py  which launcher
    srun.py       the same with steps of a Slurm job
    step.py       the part of that which runs on the node
    pods.py       the same in the pods of a Kubernetes JobSet
    process.py    signals, locks and ports of a command's process

What is known of a run:
    state.py      reads the run's files and folds them into a RunState
    logs.py       reads logs; `megarl logs`
    health.py     judges by the metrics whether a run is healthy
    scores.py     the best and the last held-out score, and what they warn of
    view.py       renders the state: the live view
    status.py     the same once: `megarl status`, and `megarl health`
    summary.py    the results of a run
"""
