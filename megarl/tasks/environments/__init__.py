"""What answers the turns of a policy: tools and games. Token ids in, token ids out.

    prompt ─► turn of the policy ─► step ─► reply, masked from the loss ─► turn ─► … ─► done ─► reward, or the task's grader
              ended by the end token,         or a stop token of the environment

protocol.py    Environment, which a user writes; Observation; Setting: what it is made with
registry.py    Environments: those of a recipe, by task
bounded.py     one environment in one episode: limits of its turns and time, what the metrics count
host.py        keeps an environment's process alive; worker.py: what that process is
framing.py     how the text of a reply stands between two turns
python.py      runs the program of a turn in the sandbox
calculator.py  whole numbers, within a thought
guessing.py    a game that gives the reward itself
"""
