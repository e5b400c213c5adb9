"""Low-precision numerics on any device: formats, rounding, scales, recipes, the emulated linear. No megatron-core."""
