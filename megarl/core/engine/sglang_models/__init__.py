"""Models that SGLang imports from here instead of its own package
(SGLANG_EXTERNAL_MODEL_PACKAGE, set in launch.py).

llama4.py     Llama 4, which also runs correctly on a CPU and loads text-only
              directories
deepseek.py   DeepSeek-V3 and GLM-4.7-Flash, whose tensors can be loaded one by one,
              with transformers' epsilon; GLM-4.5, unchanged
minimax_m2.py MiniMax-M2, also from what transformers writes and on a CPU
gpt_oss.py    gpt-oss, whose experts can be loaded one by one, with sinks in the model's
              precision
qwen3_5.py    Qwen3.5 and Qwen3-Next, from multimodal and text-only directories, also on
              a CPU
stock.py      SGLang's own dense Llama, Qwen2 and Qwen3, and Qwen3-MoE, so that its two
              hundred others need not be imported

SGLang imports every module of this package in the processes of a server, and serves the
classes in `EntryClass`. ../served.py describes how a server stores the tensors.
"""
