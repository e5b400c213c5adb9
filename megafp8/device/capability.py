"""Which layer implementation and which FP8 recipe run on a machine, natively or emulated, and why not.

A `Target` describes the machine: this one, or one that is not here (`--target h200`), so that a dry run on a laptop
gives the answers of the cluster.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from megafp8.config import derived, precision_map
from megafp8.config.precision_map import OUTPUT_LAYER, LinearChoice
from megafp8.config.schema import LoggingConfig, PrecisionConfig, RunConfig
from megafp8.recipes import registry
from megafp8.recipes.base import ANY_LATER

NCCL_BUFFERS = "ddp.nccl_ub=true"

_BY_BLOCK = "with it Transformer Engine reduces amaxes for all layers at once, when the last one has run"
_NOT_SAVED = "megatron-core takes out of checkpoints what an output layer remembers; tensorwise has no memory"
ATTENTION_BACKENDS = {
    "transformer_engine": ("auto", "flash", "fused", "unfused"),
    "emulated": ("auto", "sdpa"),
    "local": ("auto", "sdpa"),
}


@dataclass(frozen=True)
class Target:
    """A machine, as far as legality goes.

    Attributes:
        name: `cpu`, `h200`, or the device's own name.
        kind: `cuda` or `cpu`.
        compute_capability: major and minor, None on a CPU.
        transformer_engine: its version, None where it is not installed.
        problem: why Transformer Engine cannot be used although it is there; None if it can.
    """

    name: str
    kind: str
    compute_capability: Optional[tuple[int, int]] = None
    transformer_engine: Optional[str] = None
    problem: Optional[str] = None


TARGETS = {
    "cpu": Target("cpu", "cpu"),
    "h100": Target("h100", "cuda", (9, 0), "assumed"),
    "h200": Target("h200", "cuda", (9, 0), "assumed"),
    "b200": Target("b200", "cuda", (10, 0), "assumed"),
}


def transformer_engine_version() -> tuple[Optional[str], Optional[str]]:
    """Version of the installed Transformer Engine and what is wrong with it, without importing it."""
    try:
        version = importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        return None, None
    if not has_torch_part():
        return None, (
            f"transformer-engine {version} is installed without its torch part, and megatron-core refuses to be "
            "imported beside it: pip install 'transformer-engine[pytorch]', or pip uninstall transformer-engine"
        )
    return version, None


def has_torch_part() -> bool:
    """Whether the extension module for torch is there: beside the package (built from source) or in its wheel_lib."""
    package = importlib.util.find_spec("transformer_engine")
    if package is None:
        return False
    folders = [Path(place) for place in package.submodule_search_locations or ()]
    places = [place for folder in folders for place in (folder, folder / "wheel_lib", folder.parent)]
    return any(next(place.glob("transformer_engine_torch*.so"), None) for place in places)


def detect_target() -> Target:
    """This machine. The one function here that asks torch: the others answer where there is none, or a broken one."""
    import torch

    from megafp8.device.platform import cpu_name

    version, problem = transformer_engine_version()
    if not torch.cuda.is_available():
        return Target(cpu_name(), "cpu", None, None, problem)
    return Target(torch.cuda.get_device_name(), "cuda", torch.cuda.get_device_capability(), version, problem)


def resolve_implementation(config: RunConfig, target: Target) -> str:
    """`transformer_engine`, `emulated` or `local`: what `--transformer-impl` means on this target.

    `auto` is Transformer Engine where it is installed and has all recipes as the precision map spreads them; with
    --no-emulation also where it has not, which then is a problem.
    """
    precision = config.precision
    if precision.transformer_impl != "auto":
        return precision.transformer_impl
    if target.kind != "cuda" or not target.transformer_engine:
        return "emulated"
    has_all = not recipe_obstacles(precision, target) and not map_obstacles(config)
    return "transformer_engine" if has_all or not precision.emulation else "emulated"


def emulation_notices(config: RunConfig, target: Target) -> list[str]:
    """Why `auto` emulates layers on a GPU that has Transformer Engine; nothing where it does not, or was told to."""
    is_choice = config.precision.transformer_impl == "auto" and target.transformer_engine is not None
    if not is_choice or target.kind != "cuda" or resolve_implementation(config, target) != "emulated":
        return []
    return [
        f"all layers are emulated because of {text}; --no-emulation refuses instead"
        for text in recipe_obstacles(config.precision, target) + map_obstacles(config)
    ]


def problems(config: RunConfig, target: Target) -> list[str]:
    """Everything in the configuration that the target cannot do, each with the mend."""
    implementation = resolve_implementation(config, target)
    found = [target.problem] if target.problem else []
    found += implementation_problems(config, target, implementation)
    found += recipe_problems(config.precision, target, implementation)
    if implementation == "transformer_engine":
        found += map_problems(config) + fp8_attention_problems(config, target)
    return found


def package_problems(logging: LoggingConfig) -> list[str]:
    """Packages that were asked for and are not installed here."""
    if logging.wandb_project and importlib.util.find_spec("wandb") is None:
        return [
            f"--wandb-project {logging.wandb_project}: needs the package wandb, which is not installed; "
            "pip install wandb, or leave the flag out (records.jsonl and TensorBoard hold the same numbers)"
        ]
    return []


def implementation_problems(config: RunConfig, target: Target, implementation: str) -> list[str]:
    """Layers, attention and collectives that the target lacks."""
    found = []
    if implementation == "transformer_engine" and target.kind == "cpu":
        found.append(
            f"--transformer-impl transformer_engine: {target.name} has no CUDA device; leave the flag out, or give "
            "--transformer-impl emulated"
        )
    elif implementation == "transformer_engine" and not target.transformer_engine:
        found.append(
            "--transformer-impl transformer_engine: Transformer Engine is not installed; "
            "pip install 'megafp8[te]', or give --transformer-impl emulated"
        )
    known = ATTENTION_BACKENDS[implementation]
    if config.precision.attention_backend not in known:
        found.append(
            f"--attention-backend {config.precision.attention_backend}: the {implementation} layers have "
            f"{', '.join(known)}"
        )
    if config.parallel.distributed_backend == "nccl" and target.kind == "cpu":
        found.append(f"--distributed-backend nccl: {target.name} has no CUDA device; leave the flag out, or give gloo")
    if target.kind == "cpu":
        found += [
            f"--override {entry}: {target.name} has no CUDA device, whose memory NCCL shares; remove it"
            for entry in config.overrides
            if entry.lower() == NCCL_BUFFERS
        ]
    if implementation != "transformer_engine":
        found += needs_transformer_engine(config, target, implementation)
    return found


def needs_transformer_engine(config: RunConfig, target: Target, implementation: str) -> list[str]:
    """Options that only Transformer Engine's layers and optimizer have. Its loss takes any layers' logits."""
    precision, asked = config.precision, []
    if precision.use_transformer_engine_op_fuser:
        asked.append("--use-transformer-engine-op-fuser")
    if precision.residual_norm_fusion:
        asked.append("--residual-norm-fusion")
    if precision.swiglu_quantize_fusion:
        asked.append("--swiglu-quantize-fusion")
    if precision.quantize_kernels is not None:
        asked.append(f"--quantize-kernels {precision.quantize_kernels}")
    if precision.split_rope_fusion:
        asked.append("--split-rope-fusion")
    has_its_loss = target.kind == "cuda" and target.transformer_engine is not None
    if precision.cross_entropy_loss_fusion and precision.cross_entropy_fusion_impl == "te" and not has_its_loss:
        asked.append("--cross-entropy-fusion-impl te")
    if config.parallel.tp_comm_overlap:
        asked.append("--tp-comm-overlap")
    if config.optimizer.use_precision_aware_optimizer:
        asked.append("--use-precision-aware-optimizer")
    if config.model.window_size is not None:
        asked.append("--window-size")
    if precision.fp8_dot_product_attention:
        asked.append("--fp8-dot-product-attention")
    if derived.has_step_graph(config):
        asked.append(f"--cuda-graph-impl {config.training.cuda_graph_impl}")
    return [f"{flag}: needs --transformer-impl transformer_engine, this run has {implementation}" for flag in asked]


def recipe_problems(precision: PrecisionConfig, target: Target, implementation: str) -> list[str]:
    """Why recipes do not run, those that do not."""
    flags = {recipe: precision_map.asked_by(precision, recipe) for recipe in precision_map.used_recipes(precision)}
    if not flags or implementation == "local":  # which quantizes nowhere: a rule of the settings alone
        return []
    if implementation == "emulated":
        found = []
        if not precision.emulation:
            names = ", ".join(flags.values())
            found.append(f"--no-emulation: {names} would be emulated on {target.name}; {fix_for(target, False)}")
        two_copies = [flag for recipe, flag in flags.items() if not registry.get(recipe).supports_param_gather]
        if precision.fp8_param_gather and two_copies:
            known = ", ".join(recipe.name for recipe in registry.recipes() if recipe.supports_param_gather)
            found.append(
                f"--fp8-param-gather: {', '.join(two_copies)}, emulated, has two copies of a weight's codes, with "
                "blocks along its rows and along its columns, which together are no smaller than BF16; leave the flag "
                f"out, or give --fp8-recipe {known}"
            )
        return found
    mend = fix_for(target, precision.emulation)
    return emulated_only(precision) + [f"{text}; {mend}" for text in recipe_obstacles(precision, target)]


def recipe_obstacles(precision: PrecisionConfig, target: Target) -> list[str]:
    """The recipes that Transformer Engine does not run on a GPU of this compute capability; none without a GPU."""
    capability, found = target.compute_capability, []
    for recipe in derived.used_recipes(precision):
        if capability is None or recipe.is_native(capability):
            continue
        asked = precision_map.asked_by(precision, recipe.name)
        if not recipe.native_capabilities:
            found.append(f"{asked}: Transformer Engine does not have this recipe")
            continue
        ranges = " or ".join(
            version_text(since) + (f" and below {version_text(end)}" if end < ANY_LATER else "")
            for since, end in recipe.native_capabilities
        )
        found.append(f"{asked}: needs compute capability {ranges}, {target.name} has {version_text(capability)}")
    return found


def map_problems(config: RunConfig) -> list[str]:
    """What Transformer Engine cannot do of a precision map, with the mend."""
    return [f"{text}; change it, or give --transformer-impl emulated" for text in map_obstacles(config)]


def map_obstacles(config: RunConfig) -> list[str]:
    """What Transformer Engine cannot do of a precision map, each thing once with the first linear that asks for it.

    It quantizes a linear under the recipe of the context that the linear runs in. That has one recipe for all three
    GEMMs, or (`backward_override`, in recipes without a memory) leaves both of the backward pass in high precision.
    """
    precision = config.precision
    if config.model.num_layers is None or not precision_map.is_quantized(precision):
        return []
    found = dict[str, str]()
    is_delayed = derived.is_stateful(precision)
    if is_delayed and precision.first_last_layers_bf16:
        found["history"] = f"--first-last-layers-bf16 with delayed scaling: {_BY_BLOCK}"
    resolved = precision_map.resolve(config.model, precision)
    for name in precision_map.changed_linears(config.model, precision):
        chosen = resolved[name]
        said = f"the precision map gives {name} {chosen}"
        if is_delayed and name != OUTPUT_LAYER:
            found.setdefault("history", f"{said}: {_BY_BLOCK}")
        elif any(registry.get(recipe).is_stateful for recipe in chosen.recipes):
            found.setdefault("history", f"{said}: {_NOT_SAVED}")
        elif name == OUTPUT_LAYER and config.model.share_embeddings_and_output_weights:
            found[OUTPUT_LAYER] = (
                f"{said}: Transformer Engine's linear has a weight of its own, and the output layer has the "
                "embedding's without --untie-embeddings-and-output-weights"
            )
        elif not has_te_recipe(chosen):
            found.setdefault("mix", f"{said}: Transformer Engine has one recipe for all three, or high precision for "
                             "the backward pass")  # fmt: skip
        if precision.fp8_param_gather:
            found.setdefault("weights", f"--fp8-param-gather: {said}, and Transformer Engine makes FP8 weights by one "
                             "recipe only")  # fmt: skip
        if precision.use_transformer_engine_op_fuser and name.endswith(precision_map.MLP_LINEARS):
            found.setdefault("fuser", f"--use-transformer-engine-op-fuser: {said}, and fused ones have one recipe")
    return list(found.values())


def fp8_attention_problems(config: RunConfig, target: Target) -> list[str]:
    """Why the target has no kernel for training with attention in FP8.

    Hopper's are for heads of 128 channels (`nvte_get_fused_attn_backend`, release 2.20).
    """
    model, capability, flag = config.model, target.compute_capability, "--fp8-dot-product-attention"
    if not config.precision.fp8_dot_product_attention or capability is None:
        return []
    if capability[0] != 9:
        has = f"{target.name} has {version_text(capability)}"
        return [f"{flag}: is for compute capability 9.0 so far, {has}; remove it"]
    if model.hidden_size and model.num_attention_heads and (channels := derived.kv_channels(model)) != 128:
        return [f"{flag}: on {target.name} heads have 128 channels, not {channels}; give --kv-channels 128"]
    return []


def has_te_recipe(chosen: LinearChoice) -> bool:
    """Whether Transformer Engine has a recipe for these three GEMMs."""
    return chosen.dgrad == chosen.wgrad and (chosen.dgrad == chosen.fprop or chosen.dgrad.recipe is None)


def environment_notices(precision: PrecisionConfig, implementation: str) -> list[str]:
    """Where the environment makes Transformer Engine's recipe another than the one that the settings resolve to."""
    if implementation != "transformer_engine":
        return []
    found = []
    if precision.fp8_dot_product_attention and os.environ.get("NVTE_FP8_DPA_BWD") == "0":
        found.append("NVTE_FP8_DPA_BWD=0: Transformer Engine heeds it, so that attention's backward pass is in BF16")
    return found + [
        f"{variable}=1: Transformer Engine heeds it, so that {effect}, whatever this run says of its recipe"
        for recipe in derived.used_recipes(precision)
        for variable, effect in recipe.te_switches
        if os.environ.get(variable) == "1"
    ]


def native_recipes(target: Target) -> list[str]:
    """The recipes that Transformer Engine runs on a target."""
    is_there = target.kind == "cuda" and target.transformer_engine is not None
    return [each.name for each in registry.recipes() if is_there and each.is_native(target.compute_capability)]


def emulated_only(precision: PrecisionConfig) -> list[str]:
    """Choices of number formats that Transformer Engine does not leave to its caller."""
    by_environment = "Transformer Engine decides by its environment; leave the flag out"
    asked = {
        "--fp8-format e5m2": (
            precision.fp8_format == "e5m2" or any(entry.format == "e5m2" for entry in precision_map.entries(precision)),
            "Transformer Engine refuses E5M2 for all tensors; give e4m3 or hybrid"
        ),
        "--fp8-power-2-scale": (precision.fp8_power_2_scale, by_environment),
        "--fp8-block-scaling-fp32-scales": (precision.fp8_block_scaling_fp32_scales, by_environment),
        "--no-fp4-hadamard": (not precision.fp4_hadamard, by_environment),
        "--no-fp4-stochastic-rounding": (not precision.fp4_stochastic_rounding, by_environment),
        "--no-fp4-2d-weights": (not precision.fp4_2d_weights, by_environment),
        "--fp8-amax-reduction all": (
            precision.fp8_amax_reduction != "te",
            "Transformer Engine reduces where it gathers, and nowhere else; leave the flag out",
        ),
        "--no-fp8-wgrad": (
            not precision.fp8_wgrad,
            "Transformer Engine 2 has no such setting (megatron-core drops it unseen); leave the flag out",
        ),
    }  # fmt: skip
    return [
        f"{flag}: {reason}, or give --transformer-impl emulated"
        for flag, (is_asked, reason) in asked.items()
        if is_asked
    ]


def fix_for(target: Target, may_emulate: bool) -> str:
    """What to do instead of a recipe that the device lacks."""
    native = native_recipes(target)
    emulated = "--transformer-impl emulated runs every recipe" if may_emulate else "leave --no-emulation out"
    return f"native here: {', '.join(native)}; {emulated}" if native else f"no recipe is native here; {emulated}"


def version_text(capability: tuple[int, int]) -> str:
    """(9, 0) as 9.0."""
    return f"{capability[0]}.{capability[1]}"
