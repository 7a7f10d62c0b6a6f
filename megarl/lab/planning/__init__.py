"""`megarl plan`: what a recipe needs and how fast it will be, before anything is started. Uses no torch.

    recipe + model configuration + GPUs ─► layouts.py ─► those that fit, with memory and step time ─► show.py: table, JSON
                                                              └─► simulate.py: the pipeline in virtual time ─► figures.py

formulas.py       every formula, with its source           hardware.yaml   datasheet numbers, and assumed efficiencies
shapes.py         sizes of a model from its config.json    configs/        two public ones, for a planner without the model
workload.py       lengths, and what a step has to do       hardware.py     hardware.yaml as records
memory.py         bytes of a learner rank and a server     speed.py        seconds of training, decoding, publishing
layouts.py        which layouts and splits there are       virtual_time.py an event loop whose waits take no time
server_model.py   a server's requests, token by token      simulate.py     admission, places, decisions: the real ones
scenario.py       a plan's speeds as costs of a simulation
measured.py       lengths from a run's journal             show.py         tables and JSON
cli.py            arguments                                command.py      the command
"""
