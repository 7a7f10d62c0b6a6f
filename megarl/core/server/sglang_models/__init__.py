"""The models SGLang takes from here instead of from its own package (SGLANG_EXTERNAL_MODEL_PACKAGE, set in server.py).

llama4.py   Llama 4, with what SGLang's own gets wrong without a GPU put right, and text-only directories loaded
stock.py    SGLang's own dense Llama, Qwen2 and Qwen3, and Qwen3-MoE: named here, they are found without
            importing its two hundred others

SGLang imports every module of this package in the processes of a server, and serves the classes in `EntryClass`.
"""
