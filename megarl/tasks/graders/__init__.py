"""Rewards: is the answer after the thinking trace right? +1 if so, else −1; further rewards may be added with weights.

completion text ─► what follows `</think>`; if nothing does, that is a format error, and wrong
                      ├─ exact: equal to the prompt's answer, up to surrounding blanks (here, microseconds)
                      ├─ math:  math-verify finds it mathematically equal           (pool.py, worker.py: processes)
                      └─ code:  its last fenced block passes the tests              (code.py, sandbox.py, inside.py)

Others: an HTTP service (remote.py), the user's own function (worker.py), `format`: whether there is an answer at all.

grader.py   TaskGraders: what the controller asks, by task
answer.py   Submission: what a grader sees, and the grade that follows from verdicts
pool.py     worker processes: a hung or dead one is replaced
worker.py   the code of those processes; functions.py: the functions they run
code.py     tests of a program, compared outside the sandbox
sandbox.py  bubblewrap, or limits alone
inside.py   the source of what runs in it
"""
