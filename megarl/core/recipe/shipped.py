"""The recipes and suites that come with megarl, by name."""

from pathlib import Path

SHIPPED = Path(__file__).parents[2] / "recipes"


def shipped() -> dict[str, Path]:
    """Recipes: the quickstart and its relatives, those of GPUs, at last the baselines that ScaleRL is compared with."""
    return {p.stem: p for p in sorted(SHIPPED.glob("*.yaml"), key=_order)}


def _order(recipe: Path) -> tuple[int, str]:
    groups = ("quickstart", "scalerl-", "qwen")
    return next((n for n, start in enumerate(groups) if recipe.stem.startswith(start)), len(groups)), recipe.stem


def shipped_suites() -> dict[str, Path]:
    """Suites, for `evaluation.suites`."""
    return {p.stem: p for p in sorted((SHIPPED / "suites").glob("*.yaml"))}
