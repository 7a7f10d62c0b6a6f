"""`megarl learn`: a torchrun world of Megatron ranks that executes what the controller decides.

main.py          the collective command loop: Next -> Train | Publish | Score | Wait | Stop
torchrun.py      the learner as several processes
trainer.py       the policy, and one step: who learns from what, what is counted
network.py       a model on its ranks: micro-batches through Megatron's schedule
trained.py       a network that learns: gradients of a loss, update, whose loss was not finite
optimizer.py     AdamW over data-parallel chunks; learning rate of a step; loss scaling for fp16
critic_and_reference.py  the value network, and the frozen model of the KL penalty
microbatch.py    sequences -> tensors of one micro-batch
microbatch_size.py  how large they are, tried when the learner starts
moe.py           routers take the experts that the server chose; how evenly tokens fall on experts
clock.py         where the seconds of a step went
checkpoint.py    save without stopping, load at any layout
"""

import logging
import warnings

# What megatron says about packages a machine lacks and names it deprecates is for its developers; `megarl doctor` is for users.
# A warning of the compiler, on the first run only, has the file's path for a module.
warnings.filterwarnings(
    "ignore", module=r"megatron\.|.*/megatron/|torch\.distributed\.c10d_logger|torch\.utils\.cpp_extension"
)
logging.getLogger("megatron.core").setLevel(logging.ERROR)
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)

from megarl.shims.megatron_cpu import run_on_cpu  # noqa: E402

run_on_cpu()  # before any module of this package imports megatron
