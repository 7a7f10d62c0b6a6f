"""`megarl rollout`: the controller, which turns prompts into batches for the learner
and decides what the learner does next.

controller.py    connects the parts, and ends a run
conversation.py  receives the learner's requests and answers them, over ZeroMQ
decision.py      decides what the learner does next (pure)
servers.py       which servers are up, and which version each has
pipeline.py      admits tickets, has them generated, settles them, schedules
                 evaluations; the simulator runs it too
window.py        how far ahead of the learner to draw, from measured durations
tickets.py       how a ticket becomes a group: drawn, sampled, scored, graded
teacher.py       log-probs from the teacher's endpoint
draw.py          which task and which prompt is drawn next (pure)
evaluations.py   which versions are evaluated, on servers that are pinned for it
parity_schedule.py  which rollouts both learner and servers score, and when
metrics.py       how busy servers are, compute spent, metrics of each task
"""
