"""The machine: which device, what it can do, and what megatron-core needs to run on it."""
