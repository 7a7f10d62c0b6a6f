"""Every check of megarl, in the order in which they are made.

A function is named, not imported: most of them import what is slow, and some are of
parts above this one. Its parameters are facts by name (`making.Facts`), and its result
may be another fact.
"""

from dataclasses import dataclass
from enum import Enum


class Need(Enum):
    """What a check looks at, besides the recipe."""

    RECIPE = "recipe"
    """Nothing else: a recipe that breaks such a rule cannot be loaded."""
    FILES = "files"
    """Models, prompts, graders and other inputs."""
    MACHINE = "machine"
    """This machine: its disk, devices and packages, and the run's directory on it."""
    CLUSTER = "cluster"
    """The nodes on which roles are placed."""


class Command(Enum):
    """Who makes a check. The last three are roles, which make theirs as they start."""

    TRAIN = "megarl train"
    DRY_RUN = "megarl train --dry-run"
    SFT = "megarl sft"
    SUBMIT = "megarl submit"
    DOCTOR = "megarl doctor"
    SERVE = "megarl serve"
    ROLLOUT = "megarl rollout"
    LEARN = "megarl learn"


@dataclass(frozen=True)
class Check:
    """A check. name: in the list that a command shows. function: `module:function`.
    gives: the fact that its result is; empty if it has none.
    """

    name: str
    need: Need
    commands: frozenset[Command]
    function: str
    gives: str = ""


ALL = frozenset(Command)
START = frozenset({Command.TRAIN, Command.DRY_RUN})
SFT = frozenset({Command.SFT})
SUBMIT = frozenset({Command.SUBMIT})
DOCTOR = frozenset({Command.DOCTOR})
SERVE = frozenset({Command.SERVE})
ROLLOUT = frozenset({Command.ROLLOUT})
LEARN = frozenset({Command.LEARN})

RULES = (Check("recipe", Need.RECIPE, ALL - DOCTOR, "megarl.core.recipe.rules:impossible"),)
"""Made by `megarl.core.recipe.load`, with the types of all keys."""

INPUTS = "megarl.lab.preflight"
FILES = (
    Check("model", Need.FILES, START, f"{INPUTS}:check_model"),
    Check("tasks", Need.FILES, START, f"{INPUTS}:check_tasks"),
    Check("sources of prompts", Need.FILES, START, f"{INPUTS}:check_sources"),
    Check("chat templates", Need.FILES, START, f"{INPUTS}:check_templates"),
    Check("interruption", Need.FILES, START, f"{INPUTS}:check_interruption"),
    Check("graders", Need.FILES, START, "megarl.tasks.graders.grader:check_graders"),
    Check("environments", Need.FILES, START, f"{INPUTS}:check_environments"),
    Check("agents", Need.FILES, START, f"{INPUTS}:check_agents"),
    Check("own loss", Need.FILES, START, f"{INPUTS}:check_own_loss"),
    Check("teacher", Need.FILES, START, f"{INPUTS}:check_teacher"),
    Check("W&B", Need.FILES, START, "megarl.lab.monitoring.wandb_writer:check"),
    Check("prompts and answers", Need.FILES, START, f"{INPUTS}:read_inputs", "fingerprints"),
    Check("model to start from", Need.FILES, SFT, f"{INPUTS}:check_sft_model"),
    Check("traces", Need.FILES, SFT, f"{INPUTS}:check_sft_data"),
    Check("model to write", Need.FILES, SFT, f"{INPUTS}:check_sft_output"),
    Check("same prompts", Need.FILES, ROLLOUT, f"{INPUTS}:check_unchanged"),
)

HERE = "megarl.run.checks"
MACHINE = (
    Check("ranks", Need.MACHINE, SFT, f"{INPUTS}:check_sft_ranks"),
    Check("history", Need.MACHINE, START, f"{HERE}:check_history", "resumed"),
    Check("run directory", Need.MACHINE, START, f"{HERE}:check_writable", "folder"),
    Check("disk", Need.MACHINE, START, f"{HERE}:check_disk"),
    Check("launcher", Need.MACHINE, START, "megarl.run.srun:chosen", "launcher"),
)

PLACED = (
    Check("nodes", Need.CLUSTER, START, f"{HERE}:survey", "nodes"),
    Check("placement", Need.CLUSTER, START, "megarl.run.placement:place", "placed"),
    Check("units of compute", Need.CLUSTER, START, f"{HERE}:check_units"),
    Check("devices", Need.CLUSTER, START, f"{HERE}:check_devices"),
    Check("host memory", Need.CLUSTER, START, f"{HERE}:check_host"),
    Check("allocator", Need.CLUSTER, START, f"{HERE}:check_allocator"),
    Check("servers", Need.CLUSTER, START, f"{HERE}:check_served"),
    Check("container", Need.CLUSTER, SUBMIT, "megarl.lab.submit:check_container"),
    Check("layout", Need.CLUSTER, SUBMIT, "megarl.lab.submit:choose", "chosen"),
)

ROLES = (
    Check("served model", Need.FILES, SERVE, "megarl.core.server.checks:check"),
    Check("kernels", Need.MACHINE, SERVE, "megarl.core.server.checks:check_kernels"),
    Check("served on these GPUs", Need.MACHINE, SERVE, "megarl.core.server.checks:check_gpus"),
    Check("port", Need.MACHINE, SERVE, "megarl.core.base.process:check_free"),
    Check("room for tokens", Need.MACHINE, SERVE, "megarl.core.server.launch:check_kv"),
    Check("layers in FP8", Need.MACHINE, LEARN, "megarl.core.models.build:check"),
)
"""Made by the roles themselves, on their own nodes."""

EXAMINED = "megarl.lab.doctor"
DOCTORS = (
    Check("Python", Need.MACHINE, DOCTOR, f"{EXAMINED}:python"),
    Check("packages", Need.MACHINE, DOCTOR, f"{EXAMINED}:packages"),
    Check("CUDA", Need.MACHINE, DOCTOR, f"{EXAMINED}:cuda"),
    Check("SGLang's kernels", Need.MACHINE, DOCTOR, f"{EXAMINED}:kernels"),
    Check("compilers", Need.MACHINE, DOCTOR, f"{EXAMINED}:compilers"),
    Check("Transformer Engine", Need.MACHINE, DOCTOR, f"{EXAMINED}:transformer_engine"),
    Check("bytecode", Need.MACHINE, DOCTOR, f"{EXAMINED}:bytecode"),
    Check("machine", Need.MACHINE, DOCTOR, f"{EXAMINED}:machine"),
    Check("networks", Need.MACHINE, DOCTOR, f"{EXAMINED}:fabric"),
    Check("bubblewrap", Need.MACHINE, DOCTOR, f"{EXAMINED}:sandbox"),
    Check("templates for agents", Need.FILES, DOCTOR, f"{EXAMINED}:chat_templates"),
)
"""These return findings instead of raising: a machine may do without most of them."""

TABLE = (*RULES, *FILES, *MACHINE, *PLACED, *ROLES, *DOCTORS)
