"""The GPT itself: layer specs, emulated FP8 layers, builder and loss, on megatron-core."""
