"""One rollout, over as many requests and servers as it takes.

sampler.py         turns, legs, retries
places.py          who may send a request to which server now
length_control.py  thinking budget, interruption phrase, overlong penalty: pure
"""
