"""The GPT model on megatron-core: layer specs, emulated low-precision linears, builder, initialization and loss."""
