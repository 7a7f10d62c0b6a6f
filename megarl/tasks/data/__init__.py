"""Prompt sets, traces, and the quickstart's arithmetic task.

sources.py        streams rows from files, patterns of files, folders, or the hub
files.py          reads one file: JSON lines, JSON, CSV, TSV, Parquet, Arrow
rows.py           a row of a prompt set; the normal form of texts
columns.py        reads a row's prompt, answers, difficulty and id from columns
conversations.py  reads messages
reasoning_gym.py  problems that are made as they are read
mappings.py       published sets' rows -> rows of rows.py
programs.py       the same for programming problems
survey.py         one pass over a source decides which rows are left out or held out; a
                  second one streams the kept rows
damage.py         finds LaTeX whose backslashes a conversion has eaten
golds.py          finds expected answers that the grader of mathematics cannot read
contamination.py  finds prompts of evaluation sets by n-grams
prompts.py        a recipe's tasks -> Prompt records, checked once, kept on disk
prepare.py        `megarl data prepare`: rows in our format from any source
traces.py         warm-start rows, completions or messages -> token ids
chat.py           a model's chat template
template_environment.py   the Jinja environment of a template, with a limit on its work
arithmetic.py     writes a data set of sums
arithmetic_models.py      tiny models that learn them
products.py       writes a data set for a tool
"""
