"""`megarl learn`: Megatron ranks, started as by torchrun, that execute the controller's
decisions.

main.py                  the collective command loop:
                         Next -> Train | Publish | Score | Wait | Stop
trainer.py               the policy, and one training step on all networks
network.py               a model on its ranks: runs micro-batches through Megatron's
                         schedule
trained.py               a network that learns: gradients, update, and which sequences
                         had a loss that was not finite
late_gathering.py        weights that the next forward pass gathers, where no
                         publication follows an update
optimizer.py             AdamW over data-parallel chunks; learning rate of a step; loss
                         scaling for fp16
critic_and_reference.py  the value network, and the frozen model of the KL penalty
microbatch.py            from sequences to the tensors of one micro-batch
microbatch_size.py       the size of micro-batches, found by trials when the learner
                         starts
shares.py                gives each rank the recorded experts that it replays
moe.py                   routing replay of the experts that servers chose; how evenly
                         tokens are spread over experts
clock.py                 how the time of a step was spent
offload.py               servers free their memory for the learner while it trains
checkpoint.py            saves in the background, loads into any layout
"""

import logging
import warnings

# Megatron's warnings about missing packages and deprecated names are for its
# developers; `megarl doctor` is for users. The compiler's warning, on the first run
# only, has the path of a file as its module.
warnings.filterwarnings(
    "ignore",
    module=r"megatron\.|.*/megatron/|torch\.distributed\.c10d_logger|torch\.utils\.cpp_extension",
)
logging.getLogger("megatron.core").setLevel(logging.ERROR)
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)

from megarl.shims.megatron_cpu import run_on_cpu  # noqa: E402

run_on_cpu()  # before any module of this package imports megatron
