"""Capabilities of a machine: which layer implementation and which recipes run on it, native or emulated, and why not.

A `Target` is this machine or another one (`--target h200`): a dry run on a laptop gives the result of the cluster.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from megafp8.config import derived, dimensions, fp8_lm, mixture, precision_map, precision_schedule
from megafp8.config.gpu_names import COMPUTE_CAPABILITIES
from megafp8.config.layer_backends import EMULATED, TRANSFORMER_ENGINE, LayerBackend, requested_backend
from megafp8.config.precision_map import OUTPUT_LAYER, LinearChoice
from megafp8.config.schema import ModelConfig, PrecisionConfig, RunConfig
from megafp8.device import nccl_buffers
from megafp8.device.layer_support import (
    ATTENTION_SWITCHES,
    attention_kernel_problems,
    context_parallel_attention_problems,
    emulated_only_options,
    expert_kernel_problems,
    fp16_master_problems,
    gathered_codes_problems,
    graph_problems,
    quantizer_problems,
    unsupported_in_model,
)
from megafp8.recipes import registry
from megafp8.recipes.base import ANY_LATER
from megafp8.utils.installation import transformer_engine_command

_BY_BLOCK = "Transformer Engine reduces the amaxes of all layers together, after the last layer"
_NOT_SAVED = "megatron-core does not save the amax history of an output layer; use a recipe without amax history"

# Of cuDNN's deterministic backward kernels for documents on Hopper, as Transformer Engine 2.20 measured them.
MAX_DETERMINISTIC_PRODUCTS, BYTES_OF_PRODUCT = 2**30, 128


@dataclass(frozen=True)
class Target:
    """The properties of a machine that decide which configurations it can run.

    Attributes:
        name: `cpu`, `h200`, or the device's own name.
        kind: `cuda` or `cpu`.
        compute_capability: major and minor; None on a CPU.
        transformer_engine: version of Transformer Engine; None if it is not installed.
        problem: why an installed Transformer Engine cannot be used; None if it can.
        memory_gib, peak_tflops: of a GPU that is only like the named one; None are those of the named one.
    """

    name: str
    kind: str
    compute_capability: Optional[tuple[int, int]] = None
    transformer_engine: Optional[str] = None
    problem: Optional[str] = None
    memory_gib: Optional[float] = None
    peak_tflops: Optional[float] = None


TARGETS = {
    "cpu": Target("cpu", "cpu"),
    **{name: Target(name, "cuda", since, "assumed") for name, since in COMPUTE_CAPABILITIES.items()},
}


def transformer_engine_version() -> tuple[Optional[str], Optional[str]]:
    """Version and problem of the installed Transformer Engine, without importing it."""
    try:
        version = importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        return None, None
    if not has_te_torch_extension():
        return None, (
            f"transformer-engine {version} is installed without its torch extension, so megatron-core cannot be "
            f"imported: {transformer_engine_command(version)}, or pip uninstall transformer-engine"
        )
    return version, None


def has_te_torch_extension() -> bool:
    """Whether the extension module for torch exists: next to the package (built from source), or in its wheel_lib."""
    package = importlib.util.find_spec("transformer_engine")
    if package is None:
        return False
    folders = [Path(location) for location in package.submodule_search_locations or ()]
    locations = [location for folder in folders for location in (folder, folder / "wheel_lib", folder.parent)]
    return any(next(location.glob("transformer_engine_torch*.so"), None) for location in locations)


def count_gpus() -> int:
    """Return the number of GPUs that this process may use, without creating a CUDA context."""
    import torch

    return torch.cuda.device_count()


def detect_target() -> Target:
    """This machine. Only this function needs torch; the others work if torch is missing or broken."""
    import torch

    from megafp8.device.platform import cpu_name

    version, problem = transformer_engine_version()
    if not torch.cuda.is_available():
        return Target(cpu_name(), "cpu", None, None, problem)
    return Target(torch.cuda.get_device_name(), "cuda", torch.cuda.get_device_capability(), version, problem)


def layer_backend(model: ModelConfig, precision: PrecisionConfig, target: Target) -> LayerBackend:
    """The layers that `--transformer-impl` selects on this target.

    `auto` is Transformer Engine if it is installed and has all recipes in the combination that the precision map needs.
    With --no-emulation it is Transformer Engine even if it lacks some, which is then a problem.
    """
    if (requested := requested_backend(precision)) is not None:
        return requested
    if target.kind != "cuda" or not target.transformer_engine:
        return EMULATED
    is_supported = not unsupported_recipes(precision, target) and not unsupported_layers(model, precision)
    return TRANSFORMER_ENGINE if is_supported or not precision.emulation else EMULATED


def emulation_warnings(model: ModelConfig, precision: PrecisionConfig, target: Target) -> list[str]:
    """Why `auto` emulates layers on a GPU with Transformer Engine, and what is slow in emulated layers on a GPU."""
    if target.kind != "cuda" or not layer_backend(model, precision, target).emulates:
        return []
    warnings = list[str]()
    recipes = derived.used_recipes(precision)
    without_kernels = [recipe.name for recipe in recipes if not recipe.rules(options=vars(precision)).has_kernels]
    if precision.transformer_impl == "auto" and target.transformer_engine is not None:
        decodes = any(not recipe.scaled_mm_capabilities for recipe in recipes)
        is_known = decodes and not without_kernels
        cost = "; on an H200 a step takes 1.2 to 1.4 times as long as in BF16" if is_known else ""
        warnings += [
            f"all layers are emulated because of {text}{cost}; to get an error instead: --no-emulation"
            for text in (
                *(f"{text}; {native_flags(target)}" for text in unsupported_recipes(precision, target)),
                *unsupported_layers(model, precision),
            )
        ]
    warnings += [
        f"{precision_map.recipe_source(precision, name)}: there is no kernel for its casts; in torch operations a step "
        "on an H200 took 8 to 16 times as long as in BF16"
        for name in without_kernels
    ]
    return warnings


def capability_problems(config: RunConfig, target: Target) -> list[str]:
    """Everything in the configuration that the target does not support, with fixes."""
    model, parallel, precision = config.model, config.parallel, config.precision
    implementation = layer_backend(model, precision, target)
    found = [target.problem] if target.problem else []
    found += implementation_problems(config, target, implementation)
    found += recipe_problems(precision, target, implementation)
    if target.kind == "cuda" and derived.uses_cuda_graph(config):
        limits = implementation.graph_limits(config, target.transformer_engine is not None)
        found += graph_problems(config.training.cuda_graph_impl, limits)
    if implementation.needs_transformer_engine:
        unsupported = unsupported_layers(model, precision)
        found += [f"{text}; change it, or use --transformer-impl emulated" for text in unsupported]
        found += fp8_attention_problems(model, precision, target) + deterministic_attention_problems(config, target)
        found += quantizer_problems(config)
        found += fp16_master_problems(precision, config.optimizer) + gathered_codes_problems(parallel, precision)
    return fp8_lm.with_origins(found, config)


def implementation_problems(config: RunConfig, target: Target, implementation: LayerBackend) -> list[str]:
    """Layers, attention backends and collectives that the target does not support."""
    found = []
    if implementation.needs_transformer_engine and target.kind == "cpu":
        found.append(
            f"--transformer-impl transformer_engine: {target.name} has no CUDA device; remove the flag, or use "
            "--transformer-impl emulated"
        )
    elif implementation.needs_transformer_engine and not target.transformer_engine:
        found.append(
            "--transformer-impl transformer_engine: Transformer Engine is not installed; "
            f"{transformer_engine_command()}, or use --transformer-impl emulated"
        )
    known = implementation.attention_backends
    if config.precision.attention_backend not in known:
        found.append(
            f"--attention-backend {config.precision.attention_backend}: the {implementation} layers support "
            f"{', '.join(known)}"
        )
    if config.parallel.distributed_backend == "nccl" and target.kind == "cpu":
        found.append(f"--distributed-backend nccl: {target.name} has no CUDA device; remove the flag, or use gloo")
    if config.parallel.overlap_p2p_comm_warmup_flush and target.kind == "cpu":
        found.append(
            "--overlap-p2p-communication-warmup-flush: on CPU ranks, with gloo, validations wait forever now and then; "
            "remove it, or train on GPUs"
        )
    if mixture.exchange_library(config) and target.kind == "cpu":
        found.append(f"--moe-token-dispatcher-type flex: {target.name} has no CUDA device; use alltoall")
    if config.parallel.cp_comm_type == "a2a+p2p" and implementation.has_torch_attention:
        found.append(
            f"--cp-comm-type a2a+p2p: only Transformer Engine exchanges in two levels, the {implementation} layers "
            "all-gather keys and values; remove it together with --hierarchical-context-parallel-sizes"
        )
    found += nccl_buffers.problems(config.parallel, target.kind, target.name)
    backend, kernels = config.parallel.pipeline_model_parallel_comm_backend, config.parallel.moe_expert_kernels
    of_cuda = {
        f"--pipeline-model-parallel-comm-backend {backend}": backend is not None,
        "--moe-expert-kernels triton": kernels == "triton",
        "--log-energy": config.logging.log_energy,
        f"--cuda-graph-impl {config.training.cuda_graph_impl}": derived.uses_cuda_graph(config),
    }
    if target.kind == "cpu":
        found += [
            f"{flag}: {target.name} has no CUDA device; remove the flag" for flag, given in of_cuda.items() if given
        ]
    if implementation.needs_transformer_engine:
        if config.parallel.context_parallel_size > 1:
            documents, exchange = config.data.reset_attention_mask, dimensions.cp_exchange(config)
            found += context_parallel_attention_problems(config.model, config.parallel, documents, exchange)
        found += attention_kernel_problems(config.model, config.precision, config.parallel)
    else:
        found += te_only_options(config, target, implementation) + expert_kernel_problems(config, implementation)
    return found


def te_only_options(config: RunConfig, target: Target, implementation: LayerBackend) -> list[str]:
    """Problems of options that only Transformer Engine's layers and optimizer support."""
    precision = config.precision
    # Transformer Engine's loss also works with the logits of emulated layers.
    has_te_loss = target.kind == "cuda" and target.transformer_engine is not None
    uses_te_loss = precision.cross_entropy_loss_fusion and precision.cross_entropy_fusion_impl == "te"
    options = {
        "--use-transformer-engine-op-fuser": precision.use_transformer_engine_op_fuser,
        "--residual-norm-fusion": precision.residual_norm_fusion,
        "--swiglu-quantize-fusion": precision.swiglu_quantize_fusion,
        f"--quantize-kernels {precision.quantize_kernels}": precision.quantize_kernels is not None,
        "--split-rope-fusion": precision.split_rope_fusion,
        "--cross-entropy-fusion-impl te": uses_te_loss and not has_te_loss,
        "--tp-comm-overlap": config.parallel.tp_comm_overlap,
        "--recompute-modules moe_act": "moe_act" in derived.recompute_modules(config.training),
        "--fine-grained-activation-offloading": config.training.fine_grained_activation_offloading,
        "--use-precision-aware-optimizer": config.optimizer.use_precision_aware_optimizer and target.kind == "cuda",
        "--fp8-dot-product-attention": precision.fp8_dot_product_attention,
    }
    need = f"needs --transformer-impl transformer_engine, but this run uses {implementation}"
    reasons = {
        "--use-precision-aware-optimizer": "; Transformer Engine's Adam stores the state in low precision, and other "
        "layers round it and keep it in FP32, which saves no memory"
    }
    return [
        f"{flag}: {need}{reasons.get(flag, '')}"
        for flag, is_requested in options.items() if is_requested
    ]  # fmt: skip


def recipe_problems(precision: PrecisionConfig, target: Target, implementation: LayerBackend) -> list[str]:
    """Problems of recipes that do not run on the target."""
    flags = {recipe: precision_map.recipe_source(precision, recipe) for recipe in precision_map.used_recipes(precision)}
    if not flags or not implementation.quantizes:  # a rule of the settings covers that
        return []
    if implementation.emulates:
        found = []
        if not precision.emulation:
            names = ", ".join(flags.values())
            found.append(f"--no-emulation: {names} would be emulated on {target.name}; {recipe_fix(target, False)}")
        two_copies = [flag for recipe, flag in flags.items() if not registry.get(recipe).supports_param_gather]
        if precision.fp8_param_gather and two_copies:
            known = ", ".join(recipe.name for recipe in registry.recipes() if recipe.supports_param_gather)
            found.append(
                f"--fp8-param-gather: {', '.join(two_copies)} stores two copies of a weight's codes when emulated, "
                "with blocks along its rows and along its columns, which need as much memory as BF16; remove the flag, "
                f"or use --fp8-recipe {known}"
            )
        return found
    fix = recipe_fix(target, precision.emulation)
    return emulated_only_options(precision) + [f"{text}; {fix}" for text in unsupported_recipes(precision, target)]


def unsupported_recipes(precision: PrecisionConfig, target: Target) -> list[str]:
    """Recipes that Transformer Engine does not support on the target's compute capability; empty without a GPU."""
    capability, found = target.compute_capability, []
    for recipe in derived.used_recipes(precision):
        if capability is None or recipe.is_native(capability):
            continue
        source = precision_map.recipe_source(precision, recipe.name)
        if not recipe.native_capabilities:
            found.append(f"{source}: Transformer Engine does not have this recipe")
            continue
        ranges = " or ".join(
            capability_text(since) + (f" and below {capability_text(end)}" if end < ANY_LATER else "")
            for since, end in recipe.native_capabilities
        )
        is_newer = capability >= recipe.native_capabilities[-1][1]
        reason = f" ({recipe.beyond_capabilities})" if is_newer and recipe.beyond_capabilities else ""
        found.append(
            f"{source}: needs compute capability {ranges}, but {target.name} has {capability_text(capability)}{reason}"
        )
    return found


def unsupported_layers(model: ModelConfig, precision: PrecisionConfig) -> list[str]:
    """Parts of a precision map and options of the model that the layers on Transformer Engine do not support."""
    return unsupported_precision_map(model, precision) + unsupported_in_model(model)


def unsupported_precision_map(model: ModelConfig, precision: PrecisionConfig) -> list[str]:
    """Parts of a precision map that Transformer Engine does not support, each with the first linear that needs it.

    Transformer Engine quantizes a linear under the recipe of the surrounding context. This is one recipe for all three
    GEMMs. Stateless recipes can leave dgrad and wgrad in high precision (`backward_override`).
    """
    if model.num_layers is None or not precision_map.is_quantized(precision):
        return []
    found = dict[str, str]()
    is_delayed = derived.is_stateful(precision)
    if is_delayed and precision.first_last_layers_bf16:
        found["history"] = f"--first-last-layers-bf16 with delayed scaling: {_BY_BLOCK}"
    sources = [f"--fp8-schedule {phase}" for phase in precision_schedule.phases_with_entries(precision)]
    maps = dict(zip(["the precision map", *sources], precision_schedule.precisions(precision), strict=True))
    formats = {  # of each linear in a recipe
        (name, choice.fprop.recipe): choice.fprop.format
        for name, choice in precision_map.resolve(model, precision).items()
    }
    for source, name, chosen in (
        (source, name, precision_map.resolve(model, each)[name])
        for source, each in maps.items()
        for name in precision_map.changed_linears(model, each)
    ):
        entry = f"{source} gives {name} {chosen}"
        if formats.setdefault((name, chosen.fprop.recipe), chosen.fprop.format) != chosen.fprop.format:
            found.setdefault(
                "format", f"{entry}: Transformer Engine does not change the format of a recipe during a run"
            )
        if is_delayed and name != OUTPUT_LAYER:
            found.setdefault("history", f"{entry}: {_BY_BLOCK}")
        elif chosen.is_stateful:
            found.setdefault("history", f"{entry}: {_NOT_SAVED}")
        elif name == OUTPUT_LAYER and model.share_embeddings_and_output_weights:
            found[OUTPUT_LAYER] = (
                f"{entry}: Transformer Engine's output layer cannot share the weight of the embedding; give "
                "--untie-embeddings-and-output-weights"
            )
        elif not has_te_recipe(chosen):
            found.setdefault(
                "mix",
                f"{entry}: Transformer Engine supports one recipe for all three GEMMs, or one for fprop and high "
                "precision for the backward pass",
            )
        if precision.fp8_param_gather:
            found.setdefault(
                "weights",
                f"--fp8-param-gather: {entry}, but Transformer Engine supports FP8 weights in one recipe only",
            )
        if precision.use_transformer_engine_op_fuser and name.endswith(precision_map.MLP_LINEARS):
            found.setdefault(
                "fuser", f"--use-transformer-engine-op-fuser: {entry}, but fused operations support one recipe only"
            )
    return list(found.values())


def fp8_attention_problems(model: ModelConfig, precision: PrecisionConfig, target: Target) -> list[str]:
    """Why the target has no kernel for FP8 attention.

    Hopper has kernels for a head dimension of 128 (`nvte_get_fused_attn_backend`, Transformer Engine 2.20).
    """
    capability, flag = target.compute_capability, "--fp8-dot-product-attention"
    if not precision.fp8_dot_product_attention or capability is None:
        return []
    if capability[0] != 9:
        has = f"{target.name} has {capability_text(capability)}"
        return [f"{flag}: only compute capability 9.0 is supported, {has}; remove it"]
    if model.hidden_size and model.num_attention_heads and (channels := dimensions.kv_channels(model)) != 128:
        return [
            f"{flag}: on {target.name} only 128 channels per head are supported, not {channels}; use --kv-channels 128"
        ]
    return []


def deterministic_attention_problems(config: RunConfig, target: Target) -> list[str]:
    """Documents that are too long for cuDNN's deterministic backward kernels on Hopper.

    They need memory for documents x heads x queries x keys, and Transformer Engine (`get_attention_backend`) leaves
    them out from 2^30 on: its unfused attention needs even more. With one document a sequence, the fewest that there
    may be.
    """
    precision, parallel, heads = config.precision, config.parallel, config.model.num_attention_heads
    length, batch_size = config.data.seq_length, config.training.micro_batch_size
    is_requested = precision.deterministic_mode and config.data.reset_attention_mask
    if not is_requested or precision.attention_backend != "auto" or target.compute_capability != (9, 0):
        return []
    if not (heads and length and batch_size):
        return []
    # Context-parallel ranks divide the heads, or each has two pieces of the queries.
    context = parallel.context_parallel_size
    pieces = context if context == 1 or dimensions.cp_exchange(config) == "a2a" else 2 * context
    products = batch_size * heads * length**2 // (parallel.tensor_model_parallel_size * pieces)
    if products < MAX_DETERMINISTIC_PRODUCTS:
        return []
    return [
        f"--deterministic-mode with --reset-attention-mask and --seq-length {length}: on {target.name} deterministic "
        f"attention of documents needs {BYTES_OF_PRODUCT * products / 2**30:,.0f} GiB or more; remove "
        "--deterministic-mode, or use --transformer-impl emulated"
    ]


def has_te_recipe(chosen: LinearChoice) -> bool:
    """Whether Transformer Engine supports this combination of recipes for the three GEMMs."""
    return chosen.dgrad == chosen.wgrad and (chosen.dgrad == chosen.fprop or chosen.dgrad.recipe is None)


def environment_warnings(precision: PrecisionConfig, implementation: LayerBackend) -> list[str]:
    """Environment variables that change Transformer Engine's recipe from what the settings resolve to, or that these
    layers ignore."""
    if not implementation.needs_transformer_engine:
        # 0 is what megatron-core sets itself.
        ignored = [name for name in ATTENTION_SWITCHES.values() if os.environ.get(name, "0") != "0"]
        return [f"{' '.join(ignored)}: no effect; these layers use torch's attention"] if ignored else []
    found = []
    if precision.fp8_dot_product_attention and os.environ.get("NVTE_FP8_DPA_BWD") == "0":
        found.append("NVTE_FP8_DPA_BWD=0 is set, so Transformer Engine computes the backward pass of attention in BF16")
    return found + [
        f"{variable}=1 is set, so in Transformer Engine {effect}, regardless of this run's settings"
        for recipe in derived.used_recipes(precision)
        for variable, effect in recipe.te_switches
        if os.environ.get(variable) == "1"
    ]


def native_recipes(target: Target) -> list[str]:
    """Recipes that Transformer Engine supports on the target."""
    is_there = target.kind == "cuda" and target.transformer_engine is not None
    return [each.name for each in registry.recipes() if is_there and each.is_native(target.compute_capability)]


def native_flags(target: Target) -> str:
    """The flags of the recipes that the target supports natively, as text."""
    flags: dict[str, list[str]] = {}
    for name in native_recipes(target):
        flag, _ = registry.get(name).flag.rsplit(" ", 1)
        flags.setdefault(flag, []).append(name)
    if not flags:
        return "no recipe is supported natively"
    return "supported natively: " + "; ".join(f"{flag} {', '.join(names)}" for flag, names in flags.items())


def recipe_fix(target: Target, may_emulate: bool) -> str:
    """Alternatives to a recipe that the target does not support."""
    emulated = "--transformer-impl emulated supports every recipe" if may_emulate else "remove --no-emulation"
    return f"{native_flags(target)}; {emulated}"


def capability_text(capability: tuple[int, int]) -> str:
    """A compute capability as text: 9.0 for (9, 0)."""
    return f"{capability[0]}.{capability[1]}"
