"""How an SGLang server is started and watched.

server.py      `megarl serve`: recipe -> SGLang's arguments -> its HTTP server, in this process
checks.py      what SGLang would refuse late, or serve wrongly
gate.py        who may ask it for what
answers.py     what it answers in SGLang's place
memory.py      how much it takes of a GPU that the learner shares
workers.py     what the processes it spawns run
cpu_engine.py  what SGLang needs on a machine without a GPU; cpu_attention.py: its decoding, batched
sglang_models/ models that SGLang takes from here instead of its own
health.py      wait until a server answers
"""
