"""Optimizers, learning-rate schedule, gradient communication, non-finite gradient checks and loss-spike detection."""
