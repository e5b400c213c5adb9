"""megafp8: pretraining of GPT models in FP8, from one CPU to clusters of GPUs, on megatron-core."""

__version__ = "0.1.0"
