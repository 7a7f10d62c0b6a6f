"""Prompt sets, tokenizers, and the arithmetic task of the quickstart.

tokenizer.py    the tokenizer of a Hugging Face directory
prompts.py      JSONL rows -> Prompt records, checked once
arithmetic.py   writes a data set of sums and the tiny model that learns them
"""
