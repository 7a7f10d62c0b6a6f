"""The parts of a run. Each line imports only those above it, never tasks, run,
checks, predict, tools or cli.

base/        types, messages, admission, run directory, processes, contracts with tasks
recipe/      one YAML file, one typed tree
telemetry/   names of the metrics, spans, profiler
algorithm/   a batch: filters, advantages, losses, packing
models/      Megatron-Core's GPT, Hugging Face weights
journal/     what a controller must not forget
client/      what learner and controller know of servers
sync/        weights from the learner to the servers, both ends
sampling/    one rollout over many requests
evaluation/  answers and their metrics; parity of learner and servers
learner/     ROLE: one training step of all ranks
engine/      ROLE: an SGLang server
controller/  ROLE: decides what every role does next
"""
