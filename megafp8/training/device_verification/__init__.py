"""Compare what a device computes natively with the emulation, for a report on a new GPU."""
