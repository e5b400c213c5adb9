"""FP8 and FP4 quantization recipes, one module per recipe, and their registry.

`names()` lists the recipes, `get(name)` returns one as a `Recipe`.
"""

from megafp8.recipes.base import Recipe
from megafp8.recipes.registry import get, names

__all__ = ["Recipe", "get", "names"]
