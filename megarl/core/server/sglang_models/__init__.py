"""Models that SGLang takes from here instead of its own package (SGLANG_EXTERNAL_MODEL_PACKAGE, set in launch.py).

llama4.py   Llama 4, with SGLang's faults without a GPU corrected, and text-only directories loaded
deepseek.py DeepSeek-V3, loaded from any of its tensors one by one, with transformers' epsilon; GLM-4.5, as it is
gpt_oss.py  gpt-oss, loaded from experts one by one, with sinks in the model's precision
stock.py    SGLang's own dense Llama, Qwen2 and Qwen3, and Qwen3-MoE, so that its two hundred others need not be imported

SGLang imports every module of this package in the processes of a server, and serves the classes in `EntryClass`.
"""
