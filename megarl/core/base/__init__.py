"""What all other packages know.

types.py         prompts, rollouts, groups, batches          messages.py  messages between learner and controller
admission.py     the law of the pipeline, pure               contracts.py what tasks implement: graders, environments
rundir.py        the run directory                           errors.py    MegarlError
process.py       a process: its parent, its log            link.py     the asking end of a conversation with the controller
ranks.py         what ranks agree on; torch's stores      device.py  which machine and GPUs a process is on
broadcast.py     a process group for weights, whose every wait ends
checksum.py      a checksum of weights that pieces add up to
architecture.py  what a model is, by its config.json        hf_files.py  files of a Hugging Face directory
tokenizer.py     ids of a text, text of ids
"""
