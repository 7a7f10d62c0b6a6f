"""What is checked before anything starts, in one table.

table.py     every check: what it needs, which commands make it, where its function is
making.py    makes the checks of a command, and shows them as one list
inputs.py    reads a run's inputs in full
start.py     whether and where a run starts
doctor.py    `megarl doctor`: the machine
dry_run.py   what `megarl train --dry-run` shows, and warnings

A check is a function that raises a MegarlError, which names the key and the remedy. It
is written where its subject is known (a recipe's keys in core/recipe, placement in
run); the table gives the order, and names it as text.
"""
