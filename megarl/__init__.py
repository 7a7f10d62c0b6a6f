"""Reinforcement learning with Megatron-Core and SGLang.

    core/    what a run is made of: read it by docs/explanation/reading.md
    shims/   patches of megatron-core, SGLang and torch, each with the version it is for
    tasks/   data, graders and environments: what core/base/contracts.py asks for
    run/     the supervisor: starts, watches and restarts the roles
    checks/  what is checked before anything starts, in one table
    predict/ planning, scaling laws, studies
    tools/   around a run: evaluation, reports, monitoring, the warm start, jobs
    cli/     the command line, which gives tasks, checks and forecasts to the roles
    recipes/ the recipes and evaluation suites that come with megarl

    environments.py, scaling.py   what users' code imports

Imports go one way; tests/unit/test_imports.py holds them to it.
"""

__version__ = "0.2.0"
