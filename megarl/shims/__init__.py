"""Every patch of packages that are not ours. A role's main applies them by name; none imports anything of megarl.

megatron_cpu.py          megatron-core 0.19 on CPU processes
fp16_on_cpu.py           torch: products of fp16 numbers on a CPU, exact and rounded
sglang_cpu.py            SGLang 0.5.23 without a GPU; sglang_cpu_attention.py: its decoding, batched
"""
