"""Every patch of packages that are not ours. They are applied by name; none imports anything of megarl.

SGLang's are applied in the server's main. Megatron's are applied when megarl.core.models or megarl.core.learner is imported,
not in a main, because torch.cuda's names must be replaced before megatron is first imported, and whoever uses these packages
imports them at the top of a file: the learner, the warm start, checkpoints_tools, tests.

megatron_cpu.py          megatron-core 0.19 on CPU processes; its AdamW's state and routers' logits, also on a GPU
fp16_on_cpu.py           torch: products of fp16 numbers on a CPU, exact and rounded
sglang_cpu.py            SGLang 0.5.23 without a GPU; sglang_cpu_attention.py: its decoding, batched
"""
