"""Activation memory of attention without a fused kernel."""

from megafp8.config.schema import ModelConfig


def explicit_score_bytes(model: ModelConfig, implementation: str, backend: str = "auto") -> int:
    """Bytes that torch's explicit attention saves for each score, in FP32; 0 with another kernel.

    It saves the probabilities and the capped scores.

    Args:
        backend: `--attention-backend`.
    """
    is_capped = model.attention_logit_softcapping is not None
    is_chosen = model.softmax_type != "vanilla" or backend == "unfused"
    if not is_capped and (not is_chosen or implementation == "transformer_engine"):
        return 0
    return 4 * (1 + is_capped)
