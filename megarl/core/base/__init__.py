"""What all other packages know.

types.py         prompts, rollouts, groups, batches          messages.py  messages between learner and controller
admission.py     the law of the pipeline, pure               contracts.py what tasks implement: graders, environments
rundir.py        the run directory                           errors.py    MegarlError
process.py       a process: its parent, signals, lock and ports
ranks.py         values shared by ranks; torch's stores  device.py  which machine and GPUs a process is on
architecture.py  a model's sizes from its config.json        hf_files.py  files of a Hugging Face directory
tokenizer.py     text to ids and back
"""
