"""Makes what tests of several rooms need."""

from megarl.checks import inputs
from megarl.checks.making import Facts
from megarl.core.recipe import Recipe
from megarl.run.devices import HostBytes


def start_facts(recipe: Recipe) -> Facts:
    """What is known of a run whose inputs were not read and which needs no memory."""
    return inputs.facts_of(recipe) | {"fingerprints": {}, "host_bytes": HostBytes(0, 0)}
