"""Asks a model one question by transformers alone, without sampling.

    python examples/ask.py DIRECTORY "What is the capital of France?" ["Reply with a
    number."]

The third argument is the system message; without one the chat template's own is used.
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer


def main(directory: str, question: str, system: str = "") -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    messages = [{"role": "user", "content": question}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=32, do_sample=False)
    answer = output[0, inputs["input_ids"].shape[1] :]
    print(f"{question} {tokenizer.decode(answer, skip_special_tokens=True)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
