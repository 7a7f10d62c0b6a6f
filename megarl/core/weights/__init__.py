"""Publication of weights to the servers.

publisher.py      pause -> transport -> checksums -> continue; what failed on which server
transport.py      what transports share: buckets, tensors in flat arrays of a set size; what a server's checksums must be
deltas.py         what changed since the last publication, and which servers it will do for
process_group.py  transport: buckets broadcast from each pipeline stage to all servers (NCCL; gloo on CPU)
cuda_ipc.py       transport: servers read the buckets in the memory of the GPU that they share with the learner
disk.py           transport: a Hugging Face directory that each server loads
offload.py        servers free their memory for the learner while it trains
parity.py         do servers and learner compute the same model? Differences of log-probs by cause, limits, verdicts
"""
