"""Environments: tools and games that reply to the policy's turns. Token ids in, token
ids out.

    prompt ─► turn of the policy ─► step ─► reply ─► turn ─► … ─► done ─► reward
              ends with the end token       masked                or the task's grader
              or a stop token of the        from the loss
              environment

registry.py    TaskEnvironments: a recipe's environments, by task, with limits on turns
               and time
host.py        keeps an environment's process alive; worker.py: the code of that process
framing.py     Setting, the arguments of an environment, and how a reply's text is
               framed between two turns
python.py      runs the program in a turn in the sandbox
calculator.py  integer arithmetic in the middle of a thought
guessing.py    a game that gives the reward itself
"""
