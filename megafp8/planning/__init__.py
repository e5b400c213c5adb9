"""What a run will need, before it runs: estimates from the configuration alone."""
