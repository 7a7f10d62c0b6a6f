"""The recipes and suites that come with megarl, by name."""

from pathlib import Path

SHIPPED = Path(__file__).parent.parent / "recipes"


def shipped() -> dict[str, Path]:
    """Recipes."""
    return {p.stem: p for p in sorted(SHIPPED.glob("*.yaml"))}


def shipped_suites() -> dict[str, Path]:
    """Suites, for `evaluation.suites`."""
    return {p.stem: p for p in sorted((SHIPPED / "suites").glob("*.yaml"))}
