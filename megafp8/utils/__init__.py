"""General utilities that need the standard library only: files, strict JSON and YAML, text tables, processes."""
