"""How subcommands are declared: the same way in megarl/cli.py and in the cli.py of every part."""

import argparse
from collections.abc import Callable

type Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def at_least(least: int, most: int | None = None) -> Callable[[str], int]:
    """The type of an argument that is a whole number within these bounds."""

    def whole(word: str) -> int:
        number = int(word)
        if number < least or (most is not None and number > most):
            raise argparse.ArgumentTypeError(
                f"{number} is not {f'{least} or more' if most is None else f'from {least} to {most}'}"
            )
        return number

    whole.__name__ = "whole number"  # argparse names it where a word is no number at all
    return whole


def add_command(
    commands: Commands, name: str, function: Callable[[argparse.Namespace], int], about: str
) -> argparse.ArgumentParser:
    """A subcommand, to be given its arguments. function: from the parsed options to the exit status; they have it as
    `command`."""
    made = commands.add_parser(name, help=about.replace("%", "%%"), description=about)  # argparse formats `help` alone
    made.set_defaults(command=function)
    return made


def add_recipe_command(
    commands: Commands, name: str, function: Callable[[argparse.Namespace], int], about: str
) -> argparse.ArgumentParser:
    """A subcommand whose first arguments are `recipe` and `overrides`."""
    made = add_command(commands, name, function, about)
    made.add_argument("recipe", help="name of a recipe (`megarl recipes`) or a YAML file")
    made.add_argument("overrides", nargs="*", metavar="key=value", help="such as model.tensor_parallel=2")
    return made


def add_group(commands: Commands, name: str, about: str, metavar: str = "COMMAND") -> Commands:
    """A subcommand that does nothing without one of its own; where these are added."""
    made = commands.add_parser(name, help=about, description=about)
    return made.add_subparsers(title="commands", metavar=metavar, required=True)
