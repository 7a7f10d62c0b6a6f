"""Generation of one rollout, over as many requests and servers as it takes.

sampler.py         turns, their parts ("legs"), retries
places.py          which request may go to which server now
length_control.py  thinking budget, interruption phrase, overlong penalty (pure)
"""
