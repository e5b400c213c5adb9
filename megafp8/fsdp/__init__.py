"""What a run does where data-parallel ranks shard weights, gradients and optimizer state."""
