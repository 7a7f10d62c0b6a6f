"""The parts of a run. Each line imports only those above it, never tasks, run, lab or
cli.

base/        types, messages, admission, run directory, processes, contracts with tasks
recipe/      one YAML file, one typed tree
telemetry/   names of the metrics, spans, profiler
algorithm/   a batch: filters, advantages, losses, packing          models/    Megatron-Core's GPT, Hugging Face weights
journal/     what a controller must not forget
server/      SGLang servers: how they are started, protected and called
weights/     publication to the servers, and parity                 sampling/  one rollout over many requests
learner/     one training step of all ranks                         evaluation/  answers, and metrics of them
controller/  decides what every role does next
"""
