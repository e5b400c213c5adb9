"""megatron-core's configuration objects, process groups, `--override` fields and runtime patches."""
