"""`megarl eval` asks a model, `megarl answers` looks at what it said. Everything heavy is imported when a command runs."""

import argparse
from pathlib import Path

from megarl.cli.commands import Commands, add_command, add_group


def add(commands: Commands) -> None:
    """The subcommands `eval` and `answers`."""
    ask = add_command(commands, "eval", _eval, "score a model or a run's checkpoint on suites, on servers of its own")
    ask.add_argument(
        "--model",
        required=True,
        metavar="DIR_OR_RUN",
        help="Hugging Face directory, RUN (newest checkpoint) or RUN@STEP",
    )
    ask.add_argument(
        "--suite",
        required=True,
        metavar="NAME[,NAME]",
        help="aime24, aime25, math-500, gsm8k, livecodebench, humaneval, mbpp, a suite or task of the run, RUN:TASK (held "
        "out of that run), or a YAML file",
    )
    ask.add_argument("--samples", type=int, metavar="K", help="answers a prompt (default: the suite's)")
    ask.add_argument("--limit", type=int, metavar="N", help="prompts of each suite, chosen by hash (default: all)")
    ask.add_argument("--data", metavar="SOURCE", help="rows of the one suite, instead of its set on the hub")
    ask.add_argument("--out", type=Path, metavar="DIR", help="default: runs/evaluations/MODEL")
    ask.add_argument(
        "overrides", nargs="*", metavar="key=value", help="of the recipe, such as evaluation.temperature=0.6"
    )

    inner = add_group(commands, "answers", "answers of evaluations: best-of-n curves, comparisons")
    curve = add_command(inner, "curve", _curve, "score against tokens generated: best of n by majority, reward, oracle")
    curve.add_argument(
        "out", nargs="+", type=Path, metavar="OUT", help="of megarl eval, or RUN/evaluations/step-N; or RUN"
    )
    curve.add_argument("--suite", metavar="NAME", help="of those that all have (default: all)")
    curve.add_argument("--picture", type=Path, metavar="PNG", help="default: curve-SUITE.png in the first OUT")
    about = "two models on the same prompts: a table, and a page to read their answers side by side"
    compare = add_command(inner, "compare", _compare, about)
    for name in ("out_a", "out_b"):
        compare.add_argument(name, type=Path, metavar=name.upper(), help="of megarl eval, or RUN/evaluations/step-N")
    compare.add_argument("--suite", metavar="NAME", help="of those that both have (default: all)")
    compare.add_argument("-o", "--page", type=Path, metavar="HTML", help="default: compare-SUITE.html in OUT_B")


def _eval(options: argparse.Namespace) -> int:
    from megarl.lab.evaluation.main import main

    return main(options)


def _curve(options: argparse.Namespace) -> int:
    from megarl.lab.evaluation.curve import main

    return main(options.out, options.suite, options.picture)


def _compare(options: argparse.Namespace) -> int:
    from megarl.lab.evaluation.compare import main

    return main(options.out_a, options.out_b, options.suite, options.page)
