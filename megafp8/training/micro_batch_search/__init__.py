"""The search of `--micro-batch-size auto`: sizes are tried in processes of their own."""
