"""SGLang servers: how one is started, guarded and asked.

launch.py      `megarl serve`: recipe -> SGLang's arguments -> its HTTP server, in this process
workers.py     what the processes it spawns run
proxy.py       who may ask it for what, and what is answered in SGLang's place
staging.py     weights that come while a server generates, until they are swapped in
client.py      every call to it: generation, scoring, weights, memory
fleet.py       calls to several of them at once
relay.py       calls to many of them through the gates of some
membership.py  which servers there are, and whose weights each holds: pure
checks.py      what SGLang would refuse late, or serve wrongly
served.py      how it holds Hugging Face tensors
sglang_models/ models that SGLang takes from here instead of its own
"""
