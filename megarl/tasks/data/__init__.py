"""Prompt sets, traces, tokenizers, and the arithmetic task of the quickstart.

sources.py        where rows come from: JSONL, JSON, Parquet, Arrow, the Hugging Face hub; streamed
rows.py           id, prompt, answer, difficulty, read by columns
mappings.py       rows of published sets -> those; programs.py: of programming problems
survey.py         one pass over a source: what is left out and why, what is held out; a second one streams the rest
contamination.py  prompts of evaluation sets, found by n-grams        text.py   the normal form of texts
prompts.py        a recipe's tasks -> Prompt records, checked once     faults.py  many faults in one message
stored.py         where a run's prompts lie: on disk
cli.py            `megarl data`: prepare.py writes rows of ours from any source, inspection.py shows what one has
traces.py         rows of a warm start, completions or messages -> token ids
chat.py           a model's chat template                              tokenizer.py  the tokenizer of a directory
model_files.py    its weights: there, whole, how many
arithmetic.py     writes a data set of sums; arithmetic_models.py the tiny models that learn them; products.py for a tool
"""
