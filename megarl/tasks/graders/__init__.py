"""Rewards: is the answer that stands after the thinking trace right? +1 if so, else −1; others may be added by their weights.

completion text ─► what stands after `</think>`; nothing there is a format error, and wrong
                      ├─ exact: equal to the prompt's answer, blanks around it aside  (here, microseconds)
                      ├─ math:  math-verify finds it mathematically equal           (pool.py, worker.py: processes)
                      └─ code:  its last fenced block passes the tests              (code.py, sandbox.py, inside.py)

Others: a service by HTTP (remote.py), the user's own function (worker.py), `format`: is there an answer at all.

grader.py   TaskGraders: what the controller asks, by task
answer.py   Submission: what a grader sees, and the grade that follows from verdicts
pool.py     worker processes: a hung or dead one is replaced
worker.py   what they are; functions.py: what they run
code.py     tests of a program, compared outside of the sandbox
sandbox.py  bubblewrap, or limits alone
inside.py   the text of what runs in it
"""
