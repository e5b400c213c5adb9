"""megafp8: FP8 and FP4 pretraining of GPT models on megatron-core and Transformer Engine.

The core trains: all folders but those of the wings. It imports no wing.
Wings use it: `planning`, `data.preprocessing`, `checkpoint.convert`, `launch`, `analysis`,
`training.device_verification` and `cli`.
"""

__version__ = "0.1.0"
