"""Checkpoints in megatron-core's sharded format, which any layout can load."""
