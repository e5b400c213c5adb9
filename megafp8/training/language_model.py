"""A trained model on one device, built from a checkpoint of any parallel layout, that predicts the next token.

It has the layers that it was trained with, without optimizer and gradient buffers. With a key-value cache its GEMMs are
in high precision; without one they are those of training, quantized ones included.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import torch
from torch import Tensor

from megafp8.checkpoint.load import load_weights
from megafp8.checkpoint.metadata import embedding_rows, read_config
from megafp8.checkpoint.resume_point import find_source
from megafp8.config import derived, dimensions, precision_map
from megafp8.config.layer_backends import EMULATED, LayerBackend
from megafp8.config.model_plan import plan_model
from megafp8.config.schema import RunConfig
from megafp8.config.settings import with_values
from megafp8.data.tokenizers.build import Tokenizer, build_trained_tokenizer
from megafp8.device import capability, layer_support
from megafp8.device.platform import Platform, detect_platform, init_distributed, set_num_threads
from megafp8.errors import CapabilityError, DataError
from megafp8.mcore.config import build_transformer_config
from megafp8.mcore.process_groups import build_process_groups, seed_rank
from megafp8.models.builder import build_model
from megafp8.models.emulated_layers import cached_weight_codes
from megafp8.training.generation import padded_window
from megafp8.training.generation_precision import cache_warning, generation_config, quantization_words, trained_config
from megafp8.training.key_value_cache import KeyValueCache


@dataclass(frozen=True)
class LanguageModel:
    """A trained model that predicts the next token.

    Attributes:
        path: of the checkpoint.
        config: of the model on this device.
        implementation: the layers in use.
        context_tokens: length of the context window.
        length_multiple: sequence lengths must be a multiple of it, for the GEMMs.
        uses_cache: texts are generated with a key-value cache.
        warning: how the arithmetic differs from that of training because of the cache, in words; else empty.
    """

    path: Path
    config: RunConfig
    implementation: LayerBackend
    tokenizer: Tokenizer
    module: torch.nn.Module
    device: torch.device
    context_tokens: int
    length_multiple: int
    uses_cache: bool
    warning: str

    def __str__(self) -> str:
        precision = self.config.precision
        parts = [f"{self.implementation} layers", derived.params_dtype(precision), *quantization_words(precision)]
        parts += ["key-value cache"] if self.uses_cache else []
        return f"{self.path}: {', '.join(parts)}, on {self.device}"

    def build_cache(self) -> Optional[KeyValueCache]:
        """An empty cache for one text; None if texts are generated without."""
        return KeyValueCache(self.module, self.device, self.context_tokens) if self.uses_cache else None

    def cached_weights(self) -> AbstractContextManager[None]:
        """A context in which no weight changes, so that each is quantized once."""
        return cached_weight_codes([self.module])

    @torch.no_grad()
    def next_logits(self, ids: Sequence[int], cache: Optional[KeyValueCache] = None) -> Tensor:
        """Logits of the token after `ids`. Shape: (tokenizer's vocabulary,), FP32, on the CPU.

        Args:
            cache: has a prefix of `ids`, and gets the rest. It is not used once the text is longer than the context
                window: the window then slides, and every token has another position.
        """
        if cache is None or len(ids) > self.context_tokens:
            logits = self.window_logits(ids)
        else:
            logits = cache.append(ids[cache.num_tokens :])
        return logits[: self.tokenizer.vocab_size].float().cpu()

    def window_logits(self, ids: Sequence[int]) -> Tensor:
        """Logits from one pass over the last `context_tokens` of `ids`. Shape: (padded vocabulary,)."""
        window, last = padded_window(ids, self.context_tokens, self.length_multiple)
        tokens = torch.tensor([window], device=self.device)
        positions = torch.arange(len(window), device=self.device)[None]
        return self.module(tokens, positions, None)[0, last]


def load_language_model(
    folder: Path,
    step: Optional[int] = None,
    precision: Optional[str] = None,
    uses_cache: bool = True,
    tokenizer_files: Optional[Mapping[str, str]] = None,
) -> LanguageModel:
    """Build the model of a checkpoint, of any parallel layout, on this process's device.

    Args:
        folder: the run's `--save`.
        step: of the checkpoint; default the newest.
        precision: see `generation_config`.
        uses_cache: generate with a key-value cache.
        tokenizer_files: fields of the data section (`tokenizer_type`, `tokenizer_model`...) in place of the saved ones.

    Raises:
        CheckpointError: there is no checkpoint, or it cannot be read.
        ConfigError: the cache is requested for quantized GEMMs.
        DataError: the tokenizer's files are missing, or of another tokenizer.
        CapabilityError: this device does not support the precision.
    """
    found = find_source(folder, step, flag="--load ")
    path = found.path
    saved, platform = read_config(path), detect_platform()
    trained = trained_config(saved, found.step)
    chosen = generation_config(trained, precision, uses_cache, platform.has_bf16_units())
    config, implementation = single_device_config(chosen, capability.detect_target(), uses_cache)
    config = with_values(config, {f"data.{name}": value for name, value in (tokenizer_files or {}).items()})
    tokenizer = build_trained_tokenizer(config.data, saved.model.vocab_size)
    vocab_size = embedding_rows(path)
    check_vocabulary(path, saved, tokenizer, vocab_size)

    module = build_module(config, implementation, vocab_size, platform)
    load_weights(path, [module])
    multiple = derived.gemm_alignment(config.precision) if implementation.has_native_gemms else 1
    assert config.data.seq_length is not None
    return LanguageModel(
        path=path,
        config=config,
        implementation=implementation,
        tokenizer=tokenizer,
        module=module,
        device=platform.device,
        context_tokens=config.data.seq_length // multiple * multiple,
        length_multiple=multiple,
        uses_cache=uses_cache,
        warning=cache_warning(trained.precision, chosen.precision) if precision is None else "",
    )


def single_device_config(
    saved: RunConfig, target: capability.Target, uses_cache: bool = False
) -> tuple[RunConfig, LayerBackend]:
    """The configuration for forward passes of a saved model on one device, and the layers in use.

    The layers are those of the run if the device supports them, else others of the same precision. With a key-value
    cache they are megafp8's own: the cuDNN attention of Transformer Engine builds a plan for each length of the text,
    which takes 80 ms a token on an H200.

    The router adds no noise, and experts have no capacity: which tokens it drops depends on all others in the batch.

    Raises:
        CapabilityError: no layers support the precision on this device.
    """
    precision = dataclasses.replace(
        saved.precision,
        fp8_dot_product_attention=False,  # supported by few devices, and its state is for training
        # The rest is for training only, or selects other kernels for the same arithmetic.
        attention_backend="auto",
        fp8_param_gather=False,
        fp8_schedule=None,
        gradient_accumulation_fusion=False,
        cross_entropy_loss_fusion=False,
        split_rope_fusion=False,  # its kernel rotates from position 0, and keys before they are cached
        residual_norm_fusion=False,
        swiglu_quantize_fusion=False,
        quantize_kernels=None,
        use_transformer_engine_op_fuser=False,
    )
    model = dataclasses.replace(
        saved.model,
        moe_expert_capacity_factor=None,
        moe_pad_expert_input_to_capacity=False,
        moe_token_drop_policy="probs",
        moe_input_jitter_eps=None,
        mtp_num_layers=None,  # the next token is predicted by the main output, whose weights alone are loaded
    )
    overrides = tuple(entry for entry in saved.overrides if entry.startswith("transformer."))
    problems: list[str] = []
    preferred = (EMULATED.name,) if uses_cache else ()
    for layers in (*preferred, precision.transformer_impl, "auto", EMULATED.name):
        chosen = dataclasses.replace(precision, transformer_impl=layers)
        config = RunConfig(model=model, precision=chosen, data=saved.data, overrides=overrides)
        implementation = capability.layer_backend(config.model, config.precision, target)
        if implementation.has_fused_kernels:
            config = with_values(config, {"precision.quantize_kernels": "te"})
        found = capability.capability_problems(config, target)
        if not found:
            if problems := layer_support.attention_switch_problems(chosen, implementation):
                raise CapabilityError(problems)
            return config, implementation
        problems = problems or found
    is_quantized = precision_map.is_quantized(precision)
    fix = ["--precision high generates without quantization, as a key-value cache does"] if is_quantized else []
    raise CapabilityError(problems + fix)


def check_vocabulary(path: Path, saved: RunConfig, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Check the size of the tokenizer's vocabulary against the embedding.

    Raises:
        DataError: the padded vocabulary size is not that of the embedding.
    """
    padded = dimensions.padded_vocab_size(saved, tokenizer.vocab_size)
    is_other = saved.model.vocab_size is None and padded != vocab_size
    if is_other or tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and the embedding in {path} {vocab_size} rows: it was "
            "made for another tokenizer; --tokenizer-model names the right one"
        )


def build_module(
    config: RunConfig, implementation: LayerBackend, vocab_size: int, platform: Platform
) -> torch.nn.Module:
    """The complete model on this device, in eval mode. Initializes process groups of one rank."""
    set_num_threads(config.training.num_threads, derived.useful_threads(config))
    init_distributed(platform, config.parallel)
    build_process_groups(config.model, config.parallel)
    seed_rank(config.training.seed)
    transformer_config = build_transformer_config(config, implementation, platform.kind == "cuda")
    (module,) = build_model(plan_model(config), transformer_config, implementation, vocab_size)
    return module.eval()
