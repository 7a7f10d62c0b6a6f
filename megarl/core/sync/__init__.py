"""The weight protocol, both ends: new weights go from the learner to the servers.

publisher.py       pause -> transport -> checksums -> continue; errors by server
transport.py       shared by all transports: buckets (flat arrays of tensors, of a set
                   size), and the checksums to expect
process_group.py   transport: buckets broadcast from stages and copies to all servers
                   (NCCL; gloo on CPU)
cuda_ipc.py        transport: servers read the buckets in the memory of the GPU that
                   they share with the learner
disk.py            transport: a Hugging Face directory that each server loads
staging.py         the server's end: weights that arrive while it generates, until they
                   are swapped in

broadcast.py       a process group for weights; every wait in it has a time limit
checksum.py        a checksum of weights, which is the sum of its pieces' checksums
delta.py           the changes of a tensor, encoded in a few bytes
sent_deltas.py     the changes since the last publication, and which servers can use
                   them
block_fp8.py       weights in FP8 with a scale for each block, as servers may hold them
served.py          how a server stores Hugging Face tensors
served_weights.py  the weights in the form in which servers hold them, in FP8 if they
                   are asked to
"""
