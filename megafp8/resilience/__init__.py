"""Fault tolerance of a run: run lock, run state, watchdog, fault injection. Standard library only."""
