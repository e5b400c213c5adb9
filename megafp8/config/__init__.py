"""Configuration of a run: schema, command line, derived values and rules. Does not import torch."""
