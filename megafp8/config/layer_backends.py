"""The layers of `--transformer-impl`: what each of them supports, as facts that need no torch.

`device.capability.layer_backend` chooses one for a run. Whatever depends on the layers asks that object, and nothing
compares its name. `models.layer_runtime` has what needs torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import ClassVar, Final, Optional

from megafp8.config import derived
from megafp8.config.expert_layers import is_mixture
from megafp8.config.schema import PrecisionConfig, RunConfig

Reasons = Iterator[tuple[str, str]]
"""Settings that exclude something, each with the reason."""


class LayerBackend(ABC):
    """What a kind of layers supports. The defaults are those of layers without Transformer Engine.

    Attributes:
        name: the value of `--transformer-impl`.
        megatron_impl: the value of megatron-core's `transformer_impl`.
        needs_transformer_engine: the layers are Transformer Engine's, on a GPU, and have its limits.
        attention_backends: values of `--attention-backend`.
        has_torch_attention: attention is torch's. Context-parallel ranks then all-gather keys and values.
        has_fused_kernels: the op fuser, fused routing and permutation, grouped GEMMs, and their recomputation.
        pads_expert_tokens: experts pad their tokens to the alignment of GEMMs themselves.
        stacks_experts: the experts of a GPU may run in one launch; otherwise an expert is an MLP.
        quantizes: linears can have a recipe, or a scale per channel of their input.
        emulates: linears quantize and multiply by our own code, in the dtype of the parameters where a device has no
            GEMM of the codes.
        has_native_gemms: GEMMs are Transformer Engine's, of FP8 and FP4.
        arithmetic: the kind of arithmetic of quantized linears, in records.
        is_quantized_by_megatron: megatron-core's configuration has the recipe.
        keeps_transposed_codes: a weight has codes for fprop, and their transpose for dgrad.
        creates_scales_late: the scales of delayed scaling exist only after the first forward and backward pass.
        overwrites_gradients: the first wgrad of a step can overwrite the gradient buffer.
        has_low_precision_optimizer: the optimizer stores its state in the formats of its flags.
        has_step_time_model: the planner predicts the step time.
    """

    name: ClassVar[str]
    megatron_impl: ClassVar[str] = "local"
    needs_transformer_engine: ClassVar[bool] = False
    attention_backends: ClassVar[tuple[str, ...]] = ("auto", "sdpa", "unfused")
    has_torch_attention: ClassVar[bool] = True
    has_fused_kernels: ClassVar[bool] = False
    pads_expert_tokens: ClassVar[bool] = True
    stacks_experts: ClassVar[bool] = True
    quantizes: ClassVar[bool] = True
    emulates: ClassVar[bool] = False
    has_native_gemms: ClassVar[bool] = False
    arithmetic: ClassVar[str] = "emulated"
    is_quantized_by_megatron: ClassVar[bool] = False
    keeps_transposed_codes: ClassVar[bool] = False
    creates_scales_late: ClassVar[bool] = False
    overwrites_gradients: ClassVar[bool] = False
    has_low_precision_optimizer: ClassVar[bool] = False
    has_step_time_model: ClassVar[bool] = False

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__

    @abstractmethod
    def graph_limits(self, config: RunConfig, has_te: bool) -> Reasons:
        """What keeps the layers out of a CUDA graph: the flag, and why.

        Args:
            has_te: Transformer Engine is installed.
        """

    def untested_graphs(self, config: RunConfig, world_size: int) -> Reasons:
        """Settings with which a CUDA graph has to be asked for: the flag, and why."""
        yield from ()


class _TransformerEngine(LayerBackend):
    name = megatron_impl = "transformer_engine"
    needs_transformer_engine = True
    attention_backends = ("auto", "flash", "fused", "unfused")
    has_torch_attention = False
    has_fused_kernels = True
    pads_expert_tokens = False
    has_native_gemms = True
    arithmetic = "TE"
    is_quantized_by_megatron = True
    keeps_transposed_codes = True
    creates_scales_late = True
    overwrites_gradients = True
    has_low_precision_optimizer = True
    has_step_time_model = True

    def graph_limits(self, config: RunConfig, has_te: bool) -> Reasons:
        for recipe in derived.used_recipes(config.precision):
            if recipe.is_stochastic(vars(config.precision)):
                yield recipe.flag, "Transformer Engine's stochastic rounding, for Blackwell GPUs, has not been captured"
                return


class _Emulated(LayerBackend):
    name = "emulated"
    emulates = True

    def graph_limits(self, config: RunConfig, has_te: bool) -> Reasons:
        flag, parallel = f"--transformer-impl {self}", config.parallel
        sizes = (
            parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size, parallel.context_parallel_size
        )  # fmt: skip
        if not has_te:
            yield flag, "graphs need the one-pass optimizer, whose state Transformer Engine keeps; it is not installed"
        if max(sizes) > 1 or parallel.shards_weights:
            yield flag, "its graphs are of one GPU or data-parallel ranks"
        if is_mixture(config.model):
            yield flag, "its graphs have not been tested with experts"

    def untested_graphs(self, config: RunConfig, world_size: int) -> Reasons:
        """Delete a line once it ran."""
        model, precision, training = config.model, config.precision, config.training
        recomputes = derived.recompute_granularity(training) is not None
        untested = (
            (world_size > 1 and precision.fp8_param_gather, "--fp8-param-gather on several ranks"),
            (world_size > 1 and recomputes, "recomputation on several ranks"),
            (world_size > 1 and bool(model.attention_dropout or model.hidden_dropout), "dropout on several ranks"),
            (precision.fp4_four_over_six, "--fp4-four-over-six"),
            (bool(precision.fp8_saved_activations), "--fp8-saved-activations"),
            (model.multi_latent_attention, "--multi-latent-attention"),
            (config.data.reset_attention_mask, "--reset-attention-mask"),
            (training.fp8_guard != "off", f"--fp8-guard {training.fp8_guard}"),
            (training.on_nonfinite_activation == "bf16", "--on-nonfinite-activation bf16"),
        )
        for is_there, setting in untested:
            if is_there:
                reason = "its graph has not been tested on GPUs; --cuda-graph-impl local tries it"
                yield f"--transformer-impl {self} with {setting}", reason


class _Local(LayerBackend):
    name = "local"
    stacks_experts = False
    quantizes = False

    def graph_limits(self, config: RunConfig, has_te: bool) -> Reasons:
        yield f"--transformer-impl {self}", "its layers have not been captured"


TRANSFORMER_ENGINE: Final[LayerBackend] = _TransformerEngine()
EMULATED: Final[LayerBackend] = _Emulated()
LOCAL: Final[LayerBackend] = _Local()
LAYER_BACKENDS: Mapping[str, LayerBackend] = MappingProxyType(
    {backend.name: backend for backend in (TRANSFORMER_ENGINE, EMULATED, LOCAL)}
)
"""By the value of `--transformer-impl`."""


def requested_backend(precision: PrecisionConfig) -> Optional[LayerBackend]:
    """The layers that `--transformer-impl` names; None for `auto`."""
    return LAYER_BACKENDS.get(precision.transformer_impl)
