"""Low-precision numerics on any device: scaling, casts, quantized tensors and the emulated linear. No megatron-core."""
