"""Quantization recipes: one file each, and a registry."""
