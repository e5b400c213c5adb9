"""megafp8: FP8 and FP4 pretraining of GPT models on megatron-core and Transformer Engine."""

__version__ = "0.1.0"
