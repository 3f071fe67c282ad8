"""Recipes: typed schema, YAML loading, explanation. Imports neither torch nor transformers."""

from algorist.config.load import LoadedRecipe, load_recipe, recipe_names, validate
from algorist.config.schema import Recipe

__all__ = ["LoadedRecipe", "Recipe", "load_recipe", "recipe_names", "validate"]
