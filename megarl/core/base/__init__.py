"""What all other packages know.

types.py         prompts, rollouts, groups, batches
messages.py      messages between learner and controller
admission.py     which step trains a prompt (pure logic)
contracts.py     what tasks implement: graders, environments
rundir.py        the run directory
errors.py        MegarlError
files.py         regular files, read up to a limit
api_key.py       where a key of a service is: never the key itself
schema.py        the number that says how a file is to be read
terminal.py      what a terminal shows
process.py       a process: its parent, its log
link.py          the client side of requests to the controller
locks.py         locks of files
ranks.py         values shared by ranks; torch's stores
device.py        which machine and GPUs a process is on
torchrun.py      several processes of a learner or warm start
retention.py     which checkpoints stay besides the newest
tokenizer.py     text to token ids and back
hf_files.py      JSON files of a Hugging Face directory
config_values.py     types of the values in config.json
architecture.py      a model's structure, from its config.json
delta_layers.py      its gated delta networks: sizes, layers, cost
hf_tensors.py        names and shapes of its tensors, by family
safetensors_header.py   where each tensor lies in a file
weight_files.py      which files hold a model's weights
model_directory.py   the one door to a directory: all of these, compared
"""
