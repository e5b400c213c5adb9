"""What a run was asked to do: schema, command line, cross-field rules. Imports no torch, so that `--help` is instant."""
