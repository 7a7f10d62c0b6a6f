"""Prompt sets, traces, and the quickstart's arithmetic task.

sources.py        streams rows from JSONL, JSON, Parquet, Arrow, or the Hugging Face hub
reasoning_gym.py  problems that are made as they are read
rows.py           a row's id, prompt, answer and difficulty, read from columns; the normal form of texts
mappings.py       published sets' rows -> rows of rows.py; programs.py: the same for programming problems
survey.py         one pass over a source decides which rows are left out or held out; a second one streams the kept rows
contamination.py  finds prompts of evaluation sets by n-grams
prompts.py        a recipe's tasks -> Prompt records, checked once, kept on disk
prepare.py        `megarl data prepare`: rows in our format from any source
traces.py         warm-start rows, completions or messages -> token ids
chat.py           a model's chat template
arithmetic.py     writes a data set of sums; arithmetic_models.py: tiny models that learn them; products.py: a set for a tool
"""
