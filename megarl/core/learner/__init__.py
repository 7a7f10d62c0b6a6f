"""`megarl learn`: a torchrun world of Megatron ranks that executes what the controller decides.

main.py          the collective command loop: Next -> Train | Publish | Wait | Stop
link.py          rank 0's conversation with the controller
ranks.py         the learner as several processes, by torchrun.py
trainer.py       one step: who learns from what, what is counted
network.py       a model on its ranks: micro-batches through Megatron's schedule
trained.py       one that learns: gradients of a loss, update
optimizer.py     AdamW over data-parallel chunks; learning rate of a step
loss_scale.py    fp16: losses scaled up for the backward pass
reference.py     the frozen model of the KL penalty
microbatch.py    sequences -> tensors of one micro-batch
microbatch_size.py  how large they are, tried when the learner starts
cost.py          what a sequence costs, for balance
clock.py         where the seconds of a step went
nonfinite.py     whose loss was not finite
out_of_memory.py  a full GPU, in the words of the recipe
recorded.py       a step that is trained again, against the row it left before
critic.py        the value network: what each token was worth
expert_load.py   how evenly tokens fall on experts; the loss that evens it out
replay.py        routers take the experts that the server took
head/            log-probs and entropy of a split vocabulary, without its logits
losses/          one file a loss
checkpoint.py    save without stopping, load at any layout
sft.py           `megarl sft`: the same step with cross-entropy
"""

import logging
import warnings

# What megatron says about packages a machine lacks and names it deprecates is for its developers; `megarl doctor` is for users.
warnings.filterwarnings("ignore", module=r"megatron\.|torch\.distributed\.c10d_logger|torch\.utils\.cpp_extension")
logging.getLogger("megatron.core").setLevel(logging.ERROR)
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)

from megarl.shims.megatron_cpu import run_on_cpu  # noqa: E402

run_on_cpu()  # before any module of this package imports megatron
