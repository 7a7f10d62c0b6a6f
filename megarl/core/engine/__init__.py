"""`megarl serve`: an SGLang server, how it is started and protected.

launch.py        recipe -> SGLang's arguments -> its HTTP server, in this process
states.py        what is asked of SGLang for the states of delta networks
workers.py       the code that the server's child processes run
copies.py        several copies of the attention in a server: a scheduler for each
proxy.py         the gate: who may make which calls, and calls that it answers itself
memory_saver.py  what torch_memory_saver needs of the machine, to lend memory to the
                 learner
sglang_models/   our models, which SGLang uses instead of its own
"""
