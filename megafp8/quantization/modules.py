"""The emulated linear as a module of any PyTorch model: `QuantizedLinear`, and `quantize_model` to convert a model.

The arithmetic is that of the layers that megafp8 trains (`linear.py`). This module has what those get from
megatron-core: parameters, state dicts, and how the state of a recipe moves from step to step. It needs neither
megatron-core nor process groups.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Optional

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megafp8.config.settings import settings_by_name
from megafp8.errors import ConfigError
from megafp8.quantization.delayed_scaling import OPERANDS, DelayedState, reduce_and_update_scales
from megafp8.quantization.linear import emulated_linear
from megafp8.quantization.linear_plan import LinearPlan
from megafp8.quantization.nvfp4 import RoundingNoise
from megafp8.recipes import registry
from megafp8.recipes.base import LinearRecipe, Recipe
from megafp8.utils.suggestions import did_you_mean

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OUTPUT_LAYERS = ("lm_head",)  # names of the output layer in transformers' models
LARGEST_SEED = 2**62


class QuantizedLinear(nn.Linear):
    """`torch.nn.Linear` whose three GEMMs have quantized operands, by emulation on any device.

    Parameters, their names and their initial values are those of `nn.Linear`. Weights stay in high precision and are
    quantized in every forward pass.

    The state dict is that of `nn.Linear`, and with some recipes more: delayed scaling adds the buffers
    `quantizer_state.amax_history` and `quantizer_state.quant_scale`, stochastic rounding adds `rounding_state`, its
    seed and number of draws. A state dict without these loads as well, and leaves them unchanged.

    Delayed scaling updates its scales at the end of each backward pass in training mode. The first scales are 1, as in
    Transformer Engine: run a batch forward and backward without an optimizer step to start with those of the data.

    Args:
        in_features: size of each input, a multiple of the recipe's `gemm_alignment` (16; mxfp8 32, quartet2 128).
        out_features: size of each output, a multiple of it too.
        bias: add a learnable bias.
        device: device of the parameters.
        dtype: torch.float32, torch.bfloat16 or torch.float16; the input has the same, or autocast is enabled.
        recipe: one of `megafp8.recipes.names()`; by default tensorwise.
        format: one of `megafp8.recipes.get(recipe).formats`; None is the recipe's default.
        seed: of stochastic rounding; None takes it from torch's generator without advancing it.
        **options: those of the recipe, by the names of their flags: `fp8_amax_history_len=16`. The others have the
            values that `--recipe` gives them: `megafp8.recipes.get(recipe).options`.

    Shape:
        input `[*, in_features]`, output `[*, out_features]`. If gradients are needed, rows of zeros fill the input up
        to a multiple of the alignment; they change no result.

    Raises:
        ConfigError: an unknown recipe, format or option, a wrong value, or a size that is no multiple of the alignment.
    """

    quantizer_state: DelayedState  # with delayed scaling only
    rounding_state: Tensor  # with stochastic rounding only; of the last state dict

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Optional[torch.dtype] = None,
        *,
        recipe: str = registry.DEFAULT_MODULE,
        format: Optional[str] = None,
        seed: Optional[int] = None,
        **options: Any,
    ):
        check_options(recipe, format, options)
        if problem := size_problem(in_features, out_features, registry.get(recipe)):
            raise ConfigError(problem)
        super().__init__(in_features, out_features, bias, device, dtype)
        if problem := dtype_problem(self.weight.dtype):
            raise ConfigError(problem)
        self._set_recipe(recipe, format, options, _seed_from(self.weight.device) if seed is None else seed)

    def _set_recipe(self, recipe: str, format: Optional[str], options: Mapping[str, Any], seed: int) -> None:
        """Set the recipe and create its state."""
        found = registry.get(recipe)
        self.recipe, self.format = recipe, format or found.default_format
        # By name, not the rules themselves: copies and pickles of a module then share one object.
        self._options = tuple(sorted((dict(found.tested_options) | dict(options)).items()))
        rules = self.rules
        self._seed = seed
        device = torch.device("cpu") if self.weight.device.type == "meta" else self.weight.device
        # In a tuple, so that it is no submodule: its counter stays on the CPU, and is in no broadcast of buffers.
        self._noise = (RoundingNoise(str(seed)),) if rules.is_stochastic else ()
        if rules.is_stochastic:
            self.register_buffer("rounding_state", torch.tensor([seed, 0], device=device))
        if rules.delayed is not None:
            self.quantizer_state = DelayedState(rules).to(device)

    @property
    def rules(self) -> LinearRecipe:
        """How each operand of each GEMM is quantized."""
        return _rules(self.recipe, self.format, self._options)

    @torch.compiler.disable  # the GEMMs are one graph break: tracing into them makes a dozen, and is slower
    def forward(self, input: Tensor) -> Tensor:
        """y = x w^T + b with quantized operands."""
        device = input.device.type
        if not torch.is_autocast_enabled(device):
            return self._linear(input, self.weight, self.bias)
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            bias = None if self.bias is None else self.bias.to(dtype)
            return self._linear(input.to(dtype), self.weight.to(dtype), bias)

    def _linear(self, input: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
        if problem := dtype_problem(weight.dtype):
            raise TypeError(problem)
        tensors = [input, weight] if bias is None else [input, weight, bias]
        needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        rows = input.reshape(-1, self.in_features)
        num_rows = len(rows)
        padding = -num_rows % registry.get(self.recipe).gemm_alignment if needs_grad else 0  # wgrad sums over rows
        if padding:
            rows = F.pad(rows, (0, 0, 0, padding))
        plan = LinearPlan(recipe=self.rules, noise=self._stream())
        records_amax = plan.recipe.delayed is not None and self.training and torch.is_grad_enabled()
        if plan.recipe.delayed is not None:
            # Scales change after the backward pass, so that a forward pass that is recomputed there has the same ones.
            plan = dataclasses.replace(
                plan,
                delayed=self.quantizer_state.scales(records_amax),
                after_backward=self._update_scales if records_amax else None,
            )
        output = emulated_linear(rows, weight, bias, plan)
        if records_amax and not needs_grad:
            self._update_scales()
        return (output[:num_rows] if padding else output).view(*input.shape[:-1], self.out_features)

    def _update_scales(self) -> None:
        reduce_and_update_scales([self.quantizer_state], slice(0, len(OPERANDS)), None)

    def _stream(self) -> Optional[RoundingNoise]:
        """The random numbers of stochastic rounding, which differ by rank; None if the recipe rounds to nearest."""
        for noise in self._noise:
            noise.name = f"{self._seed}|{dist.get_rank() if dist.is_initialized() else 0}"
            return noise
        return None

    def _store_stream(self) -> None:
        """Write seed and number of draws to their buffer."""
        for noise in self._noise:
            self.rounding_state.copy_(torch.tensor([self._seed, noise.num_draws.item()]))

    def _save_to_state_dict(self, *args: Any) -> None:
        self._store_stream()
        super()._save_to_state_dict(*args)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self._store_stream()
        for name, buffer in self.named_buffers():  # a state dict of nn.Linear has none of them
            state_dict.setdefault(prefix + name, buffer)
        super()._load_from_state_dict(state_dict, prefix, *args)
        for noise in self._noise:
            self._seed, num_draws = self.rounding_state.tolist()
            noise.num_draws.fill_(num_draws)

    def extra_repr(self) -> str:
        """The arguments, for `print(model)`."""
        options = "".join(f", {name}={value!r}" for name, value in self._options)
        return f"{super().extra_repr()}, recipe={self.recipe!r}, format={self.format!r}{options}"


@dataclass(frozen=True)
class QuantizedLayers:
    """What `quantize_model` did, with the names of `named_modules`.

    Attributes:
        replaced: layers that are quantized now.
        skipped: layers that stay in high precision, and why.
    """

    replaced: tuple[str, ...]
    skipped: Mapping[str, str]

    def __str__(self) -> str:
        counts = Counter(self.skipped.values())
        lines = [f"{len(self.replaced)} layers quantized, {len(self.skipped)} skipped"]
        return "\n".join(lines + [f"  {count} skipped: {reason}" for reason, count in counts.items()])


def quantize_model(
    model: nn.Module,
    recipe: str = registry.DEFAULT_MODULE,
    *,
    skip: Sequence[str] = OUTPUT_LAYERS,
    format: Optional[str] = None,
    seed: int = 0,
    **options: Any,
) -> QuantizedLayers:
    """Make every `nn.Linear` of a model a `QuantizedLinear`, in place.

    The module objects stay the same, and so do their parameters, names, hooks and optimizers. Only layers of the class
    `nn.Linear` itself are converted. Everything else stays in high precision: embeddings, attention scores, subclasses
    of `nn.Linear`, experts whose weights are one stacked tensor, and `nn.MultiheadAttention`.

    Call it before DistributedDataParallel, `fully_shard` or `torch.compile`.

    Args:
        model: any PyTorch model.
        recipe: one of `megafp8.recipes.names()`; by default tensorwise.
        skip: layers to leave out, by default `("lm_head",)`: full names, last parts of names or names of a parent, with
            `*` and `?` as wildcards: `("lm_head", "model.layers.0", "*.down_proj")`.
        format: one of `megafp8.recipes.get(recipe).formats`; None is the recipe's default.
        seed: of stochastic rounding; each layer derives its own from it and its name.
        **options: those of the recipe, by the names of their flags.

    Returns:
        names of the replaced layers, and of the skipped ones with the reason.

    Raises:
        ConfigError: an unknown recipe, format or option, an entry of `skip` that matches no layer, or a model in which
            no layer can be quantized. The model is unchanged then.
    """
    check_options(recipe, format, options)
    if isinstance(skip, str):
        raise ConfigError(f"skip is the string {skip!r}: give a tuple of names, ({skip!r},)")
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):  # a shared layer has several names
        names.setdefault(module, []).append(name)
    reasons = {module: _skip_reason(module, names[module], skip, registry.get(recipe)) for module in names}
    replaced = [module for module, reason in reasons.items() if reason == ""]
    result = QuantizedLayers(
        replaced=tuple(names[module][0] for module in replaced),
        skipped={names[module][0]: reason for module, reason in reasons.items() if reason},
    )
    unmatched = [
        pattern for pattern in skip
        if pattern not in OUTPUT_LAYERS and not any(_matches(name, pattern) for name in _linear_names(names))
    ]  # fmt: skip
    if unmatched:
        raise ConfigError([f"skip: {pattern!r} matches no linear layer of the model" for pattern in unmatched])
    if not replaced:
        raise ConfigError(f"no layer of {type(model).__name__} can be quantized: {result}")
    for module in replaced:
        digest = hashlib.sha256(f"{seed}|{names[module][0]}".encode()).digest()
        # The object stays, and with it its hooks, and the parameters that other layers or an optimizer hold.
        module.__class__ = QuantizedLinear
        assert isinstance(module, QuantizedLinear)
        module._set_recipe(recipe, format, options, int.from_bytes(digest[:8], "little") % LARGEST_SEED)
    for layer in model.modules():
        if isinstance(layer, nn.TransformerEncoderLayer):
            # Without a hook it multiplies its weights itself, in high precision, where it needs no gradients.
            layer.linear1.register_forward_pre_hook(_call_linears)
    return result


def _call_linears(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """A hook that does nothing."""


def _linear_names(names: Mapping[nn.Module, Sequence[str]]) -> Iterator[str]:
    for module, aliases in names.items():
        if isinstance(module, nn.Linear):
            yield from aliases


def _skip_reason(module: nn.Module, names: Sequence[str], skip: Sequence[str], recipe: Recipe) -> Optional[str]:
    """Why a layer is not replaced; "" if it is, None if it is no linear layer."""
    kind = type(module)
    if kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers."):
        return "transformers' Conv1D stores its weight transposed: replace it by an nn.Linear with weight.t()"
    if kind is nn.MultiheadAttention:
        return "nn.MultiheadAttention reads its weights without calling a linear layer"
    if not isinstance(module, nn.Linear):
        return None
    for pattern in skip:
        if any(_matches(name, pattern) for name in names):
            return f"skip has {pattern!r}"
    if kind is QuantizedLinear:
        return f"quantized already, with recipe {module.recipe}"
    if kind is not nn.Linear:
        return f"{kind.__name__} is a subclass of nn.Linear, whose arithmetic is its own"
    problem = dtype_problem(module.weight.dtype) or size_problem(module.in_features, module.out_features, recipe)
    return problem or ""


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern of `skip` is the name of a layer, the end of it, or a parent."""
    return any(fnmatchcase(name, form) for form in (pattern, f"*.{pattern}", f"{pattern}.*", f"*.{pattern}.*"))


def check_options(recipe: str, format: Optional[str], options: Mapping[str, Any]) -> None:
    """Check a recipe's name, format and options.

    Raises:
        ConfigError: with every problem.
    """
    found = registry.get(recipe)
    problems = []
    if format is not None and format not in found.formats:
        problems.append(f"format {format!r}: recipe {recipe} has {', '.join(found.formats)}")
    for name, value in options.items():
        if name not in found.option_names:
            known = ", ".join(found.option_names) or "no options"
            hint = did_you_mean(name, [*found.option_names, "recipe", "format", "seed"], similarity=0.6)
            problems.append(f"{name!r} is no option of recipe {recipe}, which has {known}{hint}")
            continue
        setting = settings_by_name()[f"precision.{name}"]
        if type(value) is not setting.type:
            problems.append(f"{name}={value!r}: must be of type {setting.type.__name__}")
        elif setting.choices and value not in setting.choices:
            problems.append(f"{name}={value!r}: must be one of {', '.join(setting.choices)}")
        elif setting.is_out_of_range(value):
            problems.append(f"{name}={value!r}: must be {setting.range}")
    if problems:
        raise ConfigError(problems)


def size_problem(in_features: int, out_features: int, recipe: Recipe) -> str:
    """Why a recipe cannot quantize a linear of this size; "" if it can."""
    size = recipe.gemm_alignment
    wrong = {"in_features": in_features, "out_features": out_features}
    texts = [f"{name} {value}" for name, value in wrong.items() if value % size or value < 1]
    are = "are no multiples" if len(texts) > 1 else "is no multiple"
    return f"{' and '.join(texts)} {are} of {size}, which recipe {recipe.name} needs" if texts else ""


def dtype_problem(dtype: torch.dtype) -> str:
    """Why parameters of a dtype cannot be quantized; "" if they can."""
    return "" if dtype in DTYPES else f"parameters are {dtype}; must be one of {', '.join(map(str, DTYPES))}"


@functools.cache
def _rules(recipe: str, number_format: str, options: tuple[tuple[str, Any], ...]) -> LinearRecipe:
    return registry.get(recipe).rules(number_format, dict(options))


def _seed_from(device: torch.device) -> int:
    """A seed from the generator of a device. It does not advance, so that initial weights are those of nn.Linear."""
    source = device if device.type == "cuda" else torch.device("cpu")
    with torch.random.fork_rng(devices=[source] if source.type == "cuda" else []):
        return int(torch.randint(LARGEST_SEED, (), device=source))
