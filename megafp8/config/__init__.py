"""What a run was asked to do: schema, command line, rules. No torch is imported, so that `--help` is instant."""
