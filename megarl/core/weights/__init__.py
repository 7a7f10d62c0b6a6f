"""Publication of weights to the servers.

publisher.py       pause -> transport -> checksums -> continue; errors by server
transport.py       shared by all transports: buckets (flat arrays of tensors, of a set
                   size), and the checksums to expect
served_weights.py  the weights in the form in which servers hold them, in FP8 if they
                   are asked to
deltas.py          the changes since the last publication, and which servers can use
                   them
process_group.py   transport: buckets broadcast from stages and copies to all servers
                   (NCCL; gloo on CPU)
cuda_ipc.py        transport: servers read the buckets in the memory of the GPU that
                   they share with the learner
disk.py            transport: a Hugging Face directory that each server loads
offload.py         servers free their memory for the learner while it trains
parity.py          do servers and learner compute the same model? Differences of
                   log-probs by cause, limits, verdicts
"""
