"""`megarl rollout`: the controller, which turns prompts into batches for the learner and decides what it does next.

controller.py    the parts, wired; changes; the end
conversation.py  what the learner asks and when it is answered, over ZeroMQ
decision.py      what the learner is told to do next, pure
servers.py       who is up, and which version is where
pipeline.py      tickets are admitted, made, settled; versions are evaluated: the simulator runs it, too
tickets.py       how a ticket becomes a group: drawn, sampled, graded
draw.py          which task and which prompt is drawn next, pure
evaluations.py   which versions are scored, on servers that are held for it
parity.py        which rollouts both sides score, when, and what follows
metrics.py       how busy servers are, compute spent, what a row says of each task
"""
