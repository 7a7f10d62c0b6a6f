"""Prompt sets, traces, and the quickstart's arithmetic task.

sources.py        where rows come from: JSONL, JSON, Parquet, Arrow, the Hugging Face hub; streamed
rows.py           id, prompt, answer and difficulty, read by columns; the normal form of texts
mappings.py       published sets' rows -> those; programs.py: the same for programming problems
survey.py         one pass over a source decides what is left out or held out; a second one streams the rest
contamination.py  finds prompts of evaluation sets by n-grams
prompts.py        a recipe's tasks -> Prompt records, checked once, kept on disk
prepare.py        `megarl data prepare`: rows in our format from any source
traces.py         warm-start rows, completions or messages -> token ids
chat.py           a model's chat template
arithmetic.py     writes a data set of sums; arithmetic_models.py: the tiny models that learn them; products.py: one for a tool
"""
