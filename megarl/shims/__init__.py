"""All patches of packages that are not ours. They are applied by explicit calls; none
imports anything from megarl.

SGLang's are applied in the server's main. Megatron's are applied when
megarl.core.models or megarl.core.learner is imported, not in a main, because
torch.cuda's names must be replaced before megatron is first imported, and all users of
these packages import them at the top of a file: the learner, the warm start,
checkpoints_tools, tests.

megatron_cpu.py    megatron-core 0.19 on CPU processes; its AdamW's state and routers'
                   logits, also on a GPU
bf16_on_cpu.py     torch: products of bf16 numbers on a CPU, with FP32 sums; nothing is
                   replaced
fp16_on_cpu.py     torch: products of fp16 numbers on a CPU, exact and rounded
sglang_cpu.py      SGLang 0.5.23 without a GPU
sglang_cpu_attention.py    its decoding, batched
sglang_cpu_delta.py  its gated delta networks
"""
