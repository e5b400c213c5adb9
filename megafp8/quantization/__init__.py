"""Low-precision numerics on any device: formats, rounding, scales and the emulated linear. No megatron-core."""
