"""Concerns of the training loop, a module each."""
