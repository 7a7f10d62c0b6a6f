"""What learner and controller know of SGLang servers.

client.py      all calls to a server: generation, scoring, weights, memory
fleet.py       calls to several servers at once
relay.py       calls to many servers, passed on by some of them
membership.py  which servers there are, and whose weights each has (pure)
servable.py    recipes and models that SGLang would refuse late, or serve wrongly
"""
