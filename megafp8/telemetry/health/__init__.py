"""What the looks at quantization say about a run's health, in plain words, with what to try."""

from megafp8.telemetry.health.watch import HealthWatch

__all__ = ["HealthWatch"]
