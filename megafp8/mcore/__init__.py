"""Everything that configures or patches megatron-core: configuration, process groups, overrides, patches."""
