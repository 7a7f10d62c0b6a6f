"""What answers the turns of a policy: tools and games. Token ids in, token ids out.

    prompt ─► turn of the policy ─► step ─► reply, masked from the loss ─► turn ─► … ─► done ─► reward, or the task's grader
              ended by the end token,         or a stop token of the environment

registry.py    TaskEnvironments: those of a recipe, by task, each held to limits of turns and time
host.py        keeps an environment's process alive; worker.py: what that process is
framing.py     Setting, which an environment is made with: how the text of a reply stands between two turns
python.py      runs the program of a turn in the sandbox
calculator.py  whole numbers, within a thought
guessing.py    a game that gives the reward itself
"""
