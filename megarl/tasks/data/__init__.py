"""Prompt sets, traces, and the arithmetic task of the quickstart.

sources.py        where rows come from: JSONL, JSON, Parquet, Arrow, the Hugging Face hub; streamed
rows.py           id, prompt, answer, difficulty, read by columns; the normal form of texts
mappings.py       rows of published sets -> those; programs.py: of programming problems
survey.py         one pass over a source: what is left out and why, what is held out; a second one streams the rest
contamination.py  prompts of evaluation sets, found by n-grams
prompts.py        a recipe's tasks -> Prompt records, checked once, kept on disk
prepare.py        `megarl data prepare`: rows of ours from any source
traces.py         rows of a warm start, completions or messages -> token ids
chat.py           a model's chat template
arithmetic.py     writes a data set of sums; arithmetic_models.py the tiny models that learn them; products.py for a tool
"""
