"""Rewards: is the answer after the thinking trace right? +1 if so, else −1; further
rewards may be added with weights.

completion text ─► the text after `</think>`; if there is none, that is a format error,
                   and wrong
    ├─ exact: equal to the prompt's answer, up to surrounding whitespace; in this
    │         process, within microseconds
    ├─ math:  it is mathematically equal; in processes (math/, pool.py, worker.py)
    ├─ reasoning-gym: its family's scorer gives the full score (reasoning_gym.py)
    └─ code:  its last block of Python passes the tests (code.py, sandbox.py, inside.py)

Others: an HTTP service (remote.py), the user's own function (worker.py), `format`:
whether there is an answer at all.

grader.py   TaskGraders: the controller's interface to the graders, by task
answer.py   Submission: what a grader sees, and the grade that follows from verdicts
pool.py     worker processes: a hung or dead one is replaced
worker.py   the code of those processes; functions.py: the functions they run
math/       what the grader of mathematics reads; fences.py: the program in an answer
code.py     runs a program's tests, and compares results outside the sandbox
sandbox.py  bubblewrap, or resource limits alone
inside.py   the program that runs inside the sandbox
system_calls.py  which system calls are refused in there
scratch.py  temporary folders of programs and agents, removed even after SIGKILL
"""
