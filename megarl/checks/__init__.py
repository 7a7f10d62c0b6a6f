"""What is checked before anything starts, in one table.

table.py    every check: what it needs, which commands make it, where its function is
making.py   makes the checks of a command, and shows them as one list

A check is a function that raises a MegarlError, which names the key and the remedy. It
is written where its subject is known (a recipe's keys in core/recipe, prompts in lab,
placement in run); the table gives the order.
"""
