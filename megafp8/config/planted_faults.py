"""Kinds of planted faults (`training/extensions/planted_fault.py` says what each is)."""

OUTLIER_CHANNEL, ALIGNED_SWIGLU, INFLATED_QK = "outlier-channel", "aligned-swiglu", "inflated-qk"
SPIKE_BATCH, INFINITE_ACTIVATION = "spike-batch", "infinite-activation"

GRADUAL_FAULTS = (OUTLIER_CHANNEL, ALIGNED_SWIGLU, INFLATED_QK)  # they grow in every step
SUDDEN_FAULTS = (SPIKE_BATCH, INFINITE_ACTIVATION)  # they last one step
HIGH_PRECISION_FAULTS = (SPIKE_BATCH, INFLATED_QK)  # they do not depend on quantization
MLP_FAULTS = (OUTLIER_CHANNEL, ALIGNED_SWIGLU)  # gradual ones of MLPs through which all tokens pass
EMULATED_FAULTS = MLP_FAULTS  # only emulated layers can have them
