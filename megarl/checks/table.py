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
class CheckEntry:
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

RULES = (CheckEntry("recipe", Need.RECIPE, ALL - DOCTOR, "megarl.core.recipe.rules:impossible"),)
"""Made by `megarl.core.recipe.load`, with the types of all keys."""

INPUTS = "megarl.checks.inputs"
PLANNED = "megarl.predict.planning.memory"
FILES = (
    CheckEntry("model", Need.FILES, START, f"{INPUTS}:check_model"),
    CheckEntry("tasks", Need.FILES, START, f"{INPUTS}:check_tasks"),
    CheckEntry("sources of prompts", Need.FILES, START, f"{INPUTS}:check_sources"),
    CheckEntry("chat templates", Need.FILES, START, f"{INPUTS}:check_templates"),
    CheckEntry("interruption", Need.FILES, START, f"{INPUTS}:check_interruption"),
    CheckEntry("graders", Need.FILES, START, "megarl.tasks.graders.grader:check_graders"),
    CheckEntry("environments", Need.FILES, START, f"{INPUTS}:check_environments"),
    CheckEntry("agents", Need.FILES, START, f"{INPUTS}:check_agents"),
    CheckEntry("own loss", Need.FILES, START, f"{INPUTS}:check_own_loss"),
    CheckEntry("teacher", Need.FILES, START, f"{INPUTS}:check_teacher"),
    CheckEntry("W&B", Need.FILES, START, "megarl.tools.monitoring.wandb_writer:check"),
    CheckEntry("prompts and answers", Need.FILES, START, f"{INPUTS}:read_inputs", "fingerprints"),
    CheckEntry("planned memory", Need.FILES, START, f"{PLANNED}:host_bytes", "host_bytes"),
    CheckEntry("model to start from", Need.FILES, SFT, f"{INPUTS}:check_sft_model"),
    CheckEntry("traces", Need.FILES, SFT, f"{INPUTS}:check_sft_data"),
    CheckEntry("model to write", Need.FILES, SFT, f"{INPUTS}:check_sft_output"),
    CheckEntry("same prompts", Need.FILES, ROLLOUT, f"{INPUTS}:check_unchanged"),
)

HERE = "megarl.checks.start"
MACHINE = (
    CheckEntry("ranks", Need.MACHINE, SFT, f"{INPUTS}:check_sft_ranks"),
    CheckEntry("history", Need.MACHINE, START, f"{HERE}:check_history", "resumed"),
    CheckEntry("run directory", Need.MACHINE, START, f"{HERE}:check_writable", "folder"),
    CheckEntry("disk", Need.MACHINE, START, f"{HERE}:check_disk"),
    CheckEntry("launcher", Need.MACHINE, START, "megarl.run.launchers:choose_launcher", "launcher"),
)

PLACED = (
    CheckEntry("nodes", Need.CLUSTER, START, f"{HERE}:survey", "nodes"),
    CheckEntry("placement", Need.CLUSTER, START, "megarl.run.placement:place", "placed"),
    CheckEntry("units of compute", Need.CLUSTER, START, f"{HERE}:check_units"),
    CheckEntry("devices", Need.CLUSTER, START, f"{HERE}:check_devices"),
    CheckEntry("host memory", Need.CLUSTER, START, f"{HERE}:check_host"),
    CheckEntry("allocator", Need.CLUSTER, START, f"{HERE}:check_allocator"),
    CheckEntry("servers", Need.CLUSTER, START, f"{HERE}:check_served"),
    CheckEntry("container", Need.CLUSTER, SUBMIT, "megarl.tools.submit:check_container"),
    CheckEntry("layout", Need.CLUSTER, SUBMIT, "megarl.tools.submit:choose", "chosen"),
)

STATES = "megarl.core.engine.states"
ROLES = (
    CheckEntry("served model", Need.FILES, SERVE, "megarl.core.client.servable:check"),
    CheckEntry("kernels", Need.MACHINE, SERVE, "megarl.core.client.servable:check_kernels"),
    CheckEntry(
        "served on these GPUs", Need.MACHINE, SERVE, "megarl.core.client.servable:check_gpus"
    ),
    CheckEntry("port", Need.MACHINE, SERVE, "megarl.core.base.process:check_free"),
    CheckEntry("room for states", Need.MACHINE, SERVE, f"{STATES}:check_state_room"),
    CheckEntry("room for tokens", Need.MACHINE, SERVE, "megarl.core.engine.launch:check_kv"),
    CheckEntry("states of requests", Need.MACHINE, SERVE, f"{STATES}:check_states"),
    CheckEntry("layers in FP8", Need.MACHINE, LEARN, "megarl.core.models.build:check"),
)
"""Made by the roles themselves, on their own nodes."""

EXAMINED = "megarl.checks.doctor"
DOCTORS = (
    CheckEntry("Python", Need.MACHINE, DOCTOR, f"{EXAMINED}:python"),
    CheckEntry("packages", Need.MACHINE, DOCTOR, f"{EXAMINED}:packages"),
    CheckEntry("CUDA", Need.MACHINE, DOCTOR, f"{EXAMINED}:cuda"),
    CheckEntry("SGLang's kernels", Need.MACHINE, DOCTOR, f"{EXAMINED}:kernels"),
    CheckEntry("compilers", Need.MACHINE, DOCTOR, f"{EXAMINED}:compilers"),
    CheckEntry("Transformer Engine", Need.MACHINE, DOCTOR, f"{EXAMINED}:transformer_engine"),
    CheckEntry("bytecode", Need.MACHINE, DOCTOR, f"{EXAMINED}:bytecode"),
    CheckEntry("machine", Need.MACHINE, DOCTOR, f"{EXAMINED}:machine"),
    CheckEntry("networks", Need.MACHINE, DOCTOR, f"{EXAMINED}:fabric"),
    CheckEntry("bubblewrap", Need.MACHINE, DOCTOR, f"{EXAMINED}:sandbox"),
    CheckEntry("templates for agents", Need.FILES, DOCTOR, f"{EXAMINED}:chat_templates"),
)
"""These return findings instead of raising: a machine may do without most of them."""

TABLE = (*RULES, *FILES, *MACHINE, *PLACED, *ROLES, *DOCTORS)
