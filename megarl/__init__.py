"""megarl: reinforcement learning for language models with Megatron-Core learners and SGLang servers.

megarl/
  cli.py         every subcommand, thin            recipe/        the typed recipe; recipes/*.yaml by name
  commands.py    how one is declared               ports.py       free ones, and whether one is
  types.py       prompt, segment, rollout, group   messages.py    what learner and controller say to each other
  rundir.py      the run directory's form          process.py     what a role process does with itself
  admission.py   tickets and the lag rule, pure    batch.py       groups -> sequences of a step, their weights, pure
  advantages.py  from rewards, pure                packing.py     sequences -> micro-batches, pure
  gae.py         those of tokens, by a critic      collective.py  what ranks agree on
  stores.py      process groups on one network     whereabouts.py which machine and GPUs a process has
  wishes.py      signals that ask for the end      errors.py      the one kind of error that users see
  pages.py       HTML of one file                  pictures.py    colours and settings of all pictures
  lock.py        one process at a time in a dir    fp16_on_cpu.py  products of fp16 numbers, on a CPU
  hf_files.py    what a Hugging Face directory says
  supervisor/    `megarl train`: start, watch, restart, live view
  rollout/       `megarl rollout`: the controller  serving/       `megarl serve`: one SGLang server
  learner/       `megarl learn`, `megarl sft`      weights/       publication of weights to the servers
  models/        one file a family                 grading/       rewards
  scaling/       `megarl scaling`: fit, predict    study/         `megarl study`: variants compared
  evaluation/    held-out pass rate                data/          prompt sets, tokenizers, the quickstart's task
  monitor/       metrics, summary, report          doctor.py      what this machine can run
  planning/      `megarl plan`: layouts, simulator environments/  turns with tools
"""

__version__ = "0.1.0"
