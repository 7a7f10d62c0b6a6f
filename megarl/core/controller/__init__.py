"""`megarl rollout`: the controller, which turns prompts into batches for the learner and decides what the learner does next.

controller.py    the parts, wired together; how a run ends
conversation.py  the learner's requests and when they are answered, over ZeroMQ
decision.py      what the learner is told to do next, pure
servers.py       which servers are up, and which version each has
pipeline.py      admits tickets, has them generated, settles them, schedules evaluations; the simulator runs it too
window.py        how far ahead of the learner the pipeline draws, from what batches and steps took
tickets.py       how a ticket becomes a group: drawn, sampled, scored by the teacher if there is one, graded
teacher.py       scores of the teacher's servers
draw.py          which task and which prompt is drawn next, pure
evaluations.py   which versions are scored, on servers that are held for it
parity.py        which rollouts both sides score, when, and what follows
metrics.py       how busy servers are, compute spent, metrics of each task
"""
