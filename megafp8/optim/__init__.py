"""Learning-rate schedule, and the checks between gradients and update."""
