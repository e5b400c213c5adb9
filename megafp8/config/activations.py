"""Facts about the activation function of the MLP."""

from megafp8.config.schema import ModelConfig


def is_gated(model: ModelConfig) -> bool:
    """Whether linear_fc1 has two halves, of which one gates the other."""
    return model.swiglu or model.geglu or model.quick_geglu


def is_plain_swiglu(model: ModelConfig) -> bool:
    """Whether it is SwiGLU without a clamp and an offset, which fused kernels do not have."""
    return model.swiglu and model.activation_func_clamp_value is None and model.glu_linear_offset == 0
