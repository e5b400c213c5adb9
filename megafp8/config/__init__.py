"""What a run was asked to do: schema, command line, rules between settings. No torch is imported, so `--help` is instant."""
