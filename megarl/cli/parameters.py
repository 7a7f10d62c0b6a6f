"""Parameters that several commands share, with their help."""

from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option

RECIPE = "name of a recipe (`megarl recipes`) or a YAML file"
RECIPES = f"{RECIPE}, each; key=value applies to all of them"


def recipe_names(incomplete: str) -> list[str]:
    """Return the recipe names that a shell offers as completions."""
    from megarl.core.recipe import shipped

    return [name for name in shipped() if name.startswith(incomplete)]


def repeated(metavar: str, about: str) -> Any:
    """Return an option that may be given several times, with a list as its value."""
    about += "; may be given several times"
    return Option(metavar=metavar, default_factory=list, show_default=False, help=about)


RecipeName = Annotated[str, Argument(help=RECIPE, autocompletion=recipe_names)]
RecipeOrNone = Annotated[
    str | None,
    Argument(
        metavar="RECIPE",
        default_factory=lambda: None,
        show_default=False,
        help=RECIPE,
        autocompletion=recipe_names,
    ),
]
Overrides = Annotated[
    list[str],
    Argument(
        metavar="key=value",
        default_factory=list,
        show_default=False,
        help="such as model.tensor_parallel=2",
    ),
]
DryRun = Annotated[bool, Option("--dry-run", help="show what would run, and start nothing")]
RunDirectory = Annotated[Path, Argument(help="run directory")]
Json = Annotated[bool, Option("--json", help="print JSON")]
Price = Annotated[
    float | None, Option(min=0, help="price of a GPU-hour: also say what all steps cost")
]
ModelConfig = Annotated[
    str | None, Option(help="config.json, or a name such as llama-3.1-8b; else that of model.path")
]

# For `megarl plan`.
PlannedGpus = Annotated[
    int | None, Option(min=1, help="how many there are, generators and trainers together")
]
PlannedGpu = Annotated[
    str | None, Option(help="which: a name in megarl/predict/planning/hardware.yaml, such as h100")
]
MeanTokens = Annotated[
    float | None, Option(help="mean length of a completion; else half of the longest")
]
Spread = Annotated[float, Option(help="standard deviation of the lengths' logarithm")]
LengthsOf = Annotated[
    Path | None, Option(metavar="RUN", help="instead: lengths from this run's journal")
]
MeasuredRun = Annotated[
    Path | None,
    Option(metavar="RUN", help="instead of GPUs: the speeds of this run of a few steps"),
]
TrainedShare = Annotated[float, Option(help="share of groups with variance")]
Simulate = Annotated[
    bool, Option("--simulate", help="run the pipeline in virtual time, and draw it")
]
SimulatedSteps = Annotated[int, Option(min=1, help="steps of --simulate")]
SimulationPicture = Annotated[Path, Option("--out", help="picture of --simulate")]
AllocatedHours = Annotated[
    float | None,
    Option(metavar="HOURS", help="choose batch and steps for this many device-hours"),
]
AllocationCurves = Annotated[
    str, Option(metavar="RUN,RUN", help="with --allocate: short runs that differ in batch")
]
AllocationAnswers = Annotated[
    int | None, Option(min=1, help="with --allocate: prompts that the budget also answers")
]

# For `megarl submit`.
SubmittedGpu = Annotated[
    str, Option(help="a name of `megarl plan`: adds its estimates, and its layout if needed")
]
TimeLimit = Annotated[
    str | None,
    Option(help="limit, after which it is started again; else 24:00:00, with --kubernetes none"),
]
Mounts = Annotated[
    str,
    Option(metavar="A,B", help="folders that the container sees; with --kubernetes CLAIM:/folder"),
]
Kubernetes = Annotated[bool, Option("--kubernetes", help="write a JobSet for Kubernetes instead")]
Script = Annotated[
    Path | None,
    Option("--out", help="path of the script; else run.dir/run.name.sbatch"),
]

SUITES = (
    "aime24, aime25, math-500, gsm8k, livecodebench, humaneval, mbpp, arc-easy, arc-challenge,"
    " hellaswag, a suite or task of the run, RUN:TASK (held out of that run), lm-eval:TASK, or a YAML"
    " file"
)

# For studies.
Beside = Annotated[
    str, Option("--with", metavar="A,B", help="more recipes to run beside the variants")
]
Seeds = Annotated[str, Option(help="values of run.seed")]
StudyDirectory = Annotated[
    str, Option("--dir", help="the study's directory; else runs/studies/KIND-RECIPE")
]
TaskIndex = Annotated[
    int | None,
    Option(min=0, help="run this one alone, such as $SLURM_ARRAY_TASK_ID, and make no table"),
]

# For answers.
SuiteName = Annotated[str | None, Option(help="one suite that all have; else each such suite")]

# For sources of prompts.
SETS = "polaris, deepscaler, dapo-math-17k, deepcoder, gsm8k, math, livecodebench, humaneval, mbpp"
Mapping = Annotated[str, Option(metavar="SET", help=f"published set whose schema it has: {SETS}")]
COLUMN = "column of prompt, answer, difficulty or id, such as prompt=problem"
Column = Annotated[list[str], repeated("FIELD=COLUMN", COLUMN)]

# For points of learning curves, their fits and pictures.
POINTS = "a run directory, or a table of points (CSV, JSON, Parquet)"
Points = Annotated[str, Argument(help=POINTS)]
AllPoints = Annotated[
    list[Path], Argument(metavar="points", help=f"{POINTS}, each; the first is the reference")
]
SIZED = f"{POINTS}, each of a policy with N active parameters; for RUN alone, N is its model's"
SizedPoints = Annotated[list[str], Argument(metavar="N=points…", help=SIZED)]
R0 = Annotated[
    float | None, Option("--r0", help="pass rate before training, if the points have none")
]
FROM = "leave out points before these hours; else before 1,500 GPU-hours, or a shorter first epoch"
Start = Annotated[float | None, Option("--from", metavar="H", help=FROM)]
Until = Annotated[float | None, Option(metavar="H", help="leave out points after these hours")]
FormName = Literal["sigmoid", "logistic", "power"]
GridName = Annotated[Literal["free", "paper"], Option(help="A in 0 … 1, or 0.450, 0.455 … 0.800")]
Seed = Annotated[int | None, Option(min=0, help="only this seed of the file")]
HoursColumn = Annotated[
    str | None, Option(help="column of the compute; else gpu_hours or compute_hours")
]
SCORE = (
    "column of the score, such as pass_rate/math; else pass_rate, or for a run what"
    " evaluation.forecast names"
)
ScoreColumn = Annotated[str | None, Option(help=SCORE)]
PICTURE = Option(
    "-o", "--output", metavar="BASE", help="draw BASE.png, .svg, .html and related pictures"
)
DrawTo = Annotated[float | None, Option("--to", metavar="H", help="draw curves to this many hours")]
PublishedNames = Annotated[list[str], repeated("NAME", "also draw this published fit")]
