"""`megarl plan`: what a recipe needs and how fast it will be, before anything is
started. It does not use torch.

    recipe + model configuration + GPUs
        ─► layouts.py ─► layouts that fit, with memory and step time ─► show.py
                                └─► simulate.py: in virtual time     ─► figures.py

command.py       the command
measured.py      --measured RUN: how long a run will take by what another has taken
allocate.py      --allocate: the batch size and the steps on which a budget is best
                 spent
layouts.py       enumerates layouts and splits
memory.py        bytes of a learner rank and a server
speed.py         seconds of training, decoding, publishing
workload.py      lengths, and the work of a step
hardware.py      hardware.yaml: datasheets, fitted efficiencies
server_model.py  simulates a server's requests, token by token
simulate.py      runs the real admission, places and decisions on an event loop whose
                 waits take no time
show.py          tables, JSON
"""
