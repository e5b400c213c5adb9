"""Optimizer, schedules, and the checks between gradients and update."""
