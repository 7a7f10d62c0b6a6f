"""SGLang servers: how they are started, protected and called.

launch.py      `megarl serve`: recipe -> SGLang's arguments -> its HTTP server, in this process
workers.py     the code that the server's child processes run
proxy.py       the gate: who may make which calls, and calls that it answers itself
staging.py     weights that arrive while a server generates, until they are swapped in
client.py      all calls to a server: generation, scoring, weights, memory
fleet.py       calls to several servers at once
relay.py       calls to many servers, passed on by some of them
membership.py  which servers there are, and whose weights each has (pure)
checks.py      recipes and models that SGLang would refuse late, or serve wrongly
memory_saver.py  what torch_memory_saver needs of the machine, to lend memory to the
learner
served.py      how a server stores Hugging Face tensors
sglang_models/ our models, which SGLang uses instead of its own
"""
