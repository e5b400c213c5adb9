"""FP8 and FP4 quantization recipes, one module per recipe, and their registry."""
