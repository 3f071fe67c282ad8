"""Recipes: typed schema, YAML loading, explanation. Imports neither torch nor transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from algorist.config.load import LoadedRecipe, load_recipe, recipe_names, validate
    from algorist.config.schema import Recipe

__all__ = ["LoadedRecipe", "Recipe", "load_recipe", "recipe_names", "validate"]


def __getattr__(name: str) -> Any:
    """Load a recipe's reader when it is asked for: whoever takes a section's type does not read it."""
    if name not in __all__:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    from algorist.config import load, schema

    return getattr(schema if name == "Recipe" else load, name)
