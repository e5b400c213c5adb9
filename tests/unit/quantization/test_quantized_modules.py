"""QuantizedLinear and quantize_model: the arithmetic of the layers that train, state dicts, and any PyTorch model."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import megafp8
from megafp8.errors import ConfigError
from megafp8.mcore import cpu_patches
from megafp8.models.emulated_layers import EmulatedColumnParallelLinear
from megafp8.quantization.modules import QuantizedLinear, quantize_model
from megafp8.recipes import registry

INPUTS, OUTPUTS, TOKENS = 128, 256, 128
OPTIONS = {"delayed": {"fp8_amax_history_len": 4, "fp8_amax_compute_algo": "max"}}
every_recipe = pytest.mark.parametrize("recipe", registry.names())
stateful = pytest.mark.parametrize("recipe", ["delayed", "nvfp4", "quartet2"])


def small_model(recipe: str = "", **options: object) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, OUTPUTS), nn.GELU(), nn.Linear(OUTPUTS, INPUTS))
    if recipe:
        quantize_model(model, recipe, **OPTIONS.get(recipe, {}), **options)
    return model


def train(model: nn.Module, steps: Sequence[int], forward=None) -> list[float]:  # noqa: ANN001
    """Losses of some steps, whose data is that of their number."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses = []
    for step in steps:
        x = torch.randn(32, INPUTS, generator=torch.Generator().manual_seed(step))
        loss = ((forward or model)(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def results(layer: nn.Module, num_steps: int = 3) -> list[Tensor]:
    """Outputs and gradients of some forward and backward passes."""
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(num_steps):
        x = torch.randn(TOKENS, INPUTS, generator=generator).requires_grad_()
        layer.weight.grad = None
        output = layer(x)
        output = output[0] if isinstance(output, tuple) else output
        output.backward(torch.randn(TOKENS, OUTPUTS, generator=generator))
        found += [output.detach(), x.grad, layer.weight.grad.clone()]
    return found


def test_outputs_and_gradients_are_those_of_the_layers_that_train() -> None:
    """Bitwise, for every recipe, with the scales and random numbers of three steps."""

    def compare() -> None:
        cpu_patches.install()
        parallel_state.initialize_model_parallel()
        config = TransformerConfig(
            num_layers=1, hidden_size=INPUTS, num_attention_heads=4, use_cpu_initialization=True,
            perform_initialization=False,
        )  # fmt: skip
        for recipe in registry.names():
            options = OPTIONS.get(recipe, {})
            ours = QuantizedLinear(INPUTS, OUTPUTS, bias=False, recipe=recipe, **options)
            theirs = EmulatedColumnParallelLinear(
                INPUTS, OUTPUTS, config=config, init_method=nn.init.ones_, bias=False, gather_output=False,
                recipe=registry.get(recipe).rules(None, options),
            )  # fmt: skip
            theirs.weight.data.copy_(ours.weight.data)
            if theirs.noise is not None:
                theirs.noise.name = f"{ours._seed}|0"
            for mine, expected in zip(results(ours), results(theirs), strict=True):
                assert torch.equal(mine, expected), recipe

    run_ranks(1, compare)


def test_initial_weights_are_those_of_nn_linear() -> None:
    torch.manual_seed(3)
    plain = [nn.Linear(32, 64), nn.Linear(64, 32)]
    torch.manual_seed(3)
    quantized = [QuantizedLinear(32, 64, recipe="nvfp4"), QuantizedLinear(64, 32, recipe="nvfp4")]
    assert all(torch.equal(a.weight, b.weight) for a, b in zip(plain, quantized, strict=True))
    assert quantized[0]._seed != quantized[1]._seed


@every_recipe
@pytest.mark.parametrize("shape", [(7,), (), (2, 3), (0,)])
def test_any_number_of_rows(recipe: str, shape: tuple[int, ...]) -> None:
    """Zeros fill the rows that wgrad sums over; the output is that of the same rows without gradients, up to the order
    of sums."""
    layer = small_model(recipe)[0]
    x = torch.randn(*shape, INPUTS)
    with torch.no_grad():
        expected = layer(x)
    output = layer(x)
    assert output.shape == (*shape, OUTPUTS)
    torch.testing.assert_close(output, expected)
    output.sum().backward()
    assert layer.weight.grad.isfinite().all()


@every_recipe
def test_autocast_computes_in_its_dtype(recipe: str) -> None:
    layer, x = small_model(recipe)[0], torch.randn(16, INPUTS)
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(x)
        output.sum().backward()
    assert output.dtype == torch.bfloat16 and layer.weight.grad.dtype == torch.float32
    other = small_model(recipe)[0].to(torch.bfloat16)
    assert torch.equal(output, other(x.bfloat16()))


# --- state ------------------------------------------------------------------------------------------------------------


@every_recipe
def test_training_goes_on_bitwise_from_a_state_dict(recipe: str, tmp_path: Path) -> None:
    model = small_model(recipe)
    train(model, range(3))
    torch.save(model.state_dict(), tmp_path / "state.pt")
    expected = train(model, range(3, 6))
    other = small_model(recipe, seed=7)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert train(other, range(3, 6)) == expected


@stateful
def test_without_its_state_a_recipe_goes_on_otherwise(recipe: str) -> None:
    """What the test above would not notice if there were no state."""
    model = small_model(recipe)
    train(model, range(3))
    weights = {name: value.clone() for name, value in model.state_dict().items() if "state" not in name}
    expected = train(model, range(3, 6))
    other = small_model(recipe, seed=7)
    other.load_state_dict(weights)
    assert train(other, range(3, 6)) != expected


@every_recipe
def test_state_dicts_of_the_original_model(recipe: str) -> None:
    plain, model = small_model(), small_model(recipe)
    assert model.load_state_dict(plain.state_dict()).missing_keys == []
    surplus = plain.load_state_dict(model.state_dict(), strict=False).unexpected_keys
    assert bool(surplus) == (recipe in ("delayed", "nvfp4", "quartet2"))


def test_missing_weights_are_still_an_error() -> None:
    state = small_model("nvfp4").state_dict()
    del state["0.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.weight"):
        small_model("nvfp4").load_state_dict(state)


@stateful
def test_copies_and_pickles_have_the_state(recipe: str) -> None:
    model = small_model(recipe)
    train(model, range(2))
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    expected = train(model, range(2, 4))
    assert train(copied, range(2, 4)) == expected == train(pickled, range(2, 4))


def test_evaluation_does_not_change_delayed_scales() -> None:
    model = small_model("delayed")
    train(model, range(2))
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(16, INPUTS)
    model.eval()(x).sum().backward()
    with torch.no_grad():
        model.train()(x)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@every_recipe
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(recipe: str, use_reentrant: bool) -> None:
    model = small_model(recipe)

    def forward(x: Tensor) -> Tensor:
        return checkpoint(model, x.requires_grad_(), use_reentrant=use_reentrant)

    plain = small_model(recipe)
    expected = train(plain, range(4), lambda x: plain(x.requires_grad_()))
    assert train(model, range(4), forward) == expected


def test_frozen_layers_scale_with_their_data() -> None:
    layer = small_model("delayed")[0].requires_grad_(False)
    layer(torch.full((16, INPUTS), 1000.0))
    assert layer.quantizer_state.quant_scale[0] < 1


def test_ranks_of_data_parallelism_round_differently() -> None:
    def gradients() -> tuple[Tensor, list[float]]:
        model = small_model("nvfp4")
        model(torch.ones(16, INPUTS)).square().sum().backward()
        alone = model[0].weight.grad.clone()
        delayed = DistributedDataParallel(small_model("delayed"))
        return alone, train(delayed, range(2))

    (first, _), (second, _) = run_ranks(2, gradients)
    assert not torch.equal(first, second)


def test_compiled_models_have_the_same_losses() -> None:
    compiled = torch.compile(model := small_model("nvfp4"), backend="eager")
    assert train(model, range(2), compiled) == train(small_model("nvfp4"), range(2))


# --- models -----------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """An embedding whose weight is the output layer's, a layer with two names, and layers that are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.first = nn.Linear(32, 32)
        self.second = self.first
        self.odd = nn.Linear(32, 40)
        self.lm_head = nn.Linear(32, 64, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.second(self.first(self.embedding(tokens))))


def test_layers_are_replaced_in_place() -> None:
    model = Tied()
    layer, weight, optimizer = model.first, model.first.weight, torch.optim.SGD(model.parameters(), lr=0.1)
    found = quantize_model(model, "nvfp4")
    assert found.replaced == ("first",)
    assert found.skipped == {
        "odd": "out_features 40 is no multiple of 16, which recipe nvfp4 needs", "lm_head": "skip has 'lm_head'",
    }  # fmt: skip
    assert "1 layers quantized, 2 skipped" in str(found)
    assert model.first is model.second is layer and type(layer) is QuantizedLinear
    assert layer.weight is weight and any(weight is each for each in optimizer.param_groups[0]["params"])
    assert "recipe='nvfp4'" in repr(model)


def test_tied_weights_stay_tied_and_trainable() -> None:
    model = Tied()
    quantize_model(model, "nvfp4", skip=())
    assert type(model.lm_head) is QuantizedLinear and model.lm_head.weight is model.embedding.weight
    model(torch.arange(16)).square().mean().backward()
    assert model.embedding.weight.grad.abs().sum() > 0


def test_each_layer_has_its_own_random_numbers() -> None:
    model = small_model("nvfp4")
    assert model[0]._seed != model[2]._seed
    assert model[0]._seed == small_model("nvfp4")[0]._seed != small_model("nvfp4", seed=1)[0]._seed


@pytest.mark.parametrize(
    ("skip", "left"),
    [(("0",), ["2"]), (("nothing*", "2"), None), (("layers.1",), ["layers.0.a"]), (("a",), ["layers.1.b"])],
)
def test_skip(skip: tuple[str, ...], left: list[str] | None) -> None:
    model = small_model()
    if any("." in each or each == "a" for each in skip):
        layers = [nn.ModuleDict({"a": nn.Linear(32, 32)}), nn.ModuleDict({"b": nn.Linear(32, 32)})]
        model = nn.ModuleDict({"layers": nn.ModuleList(layers)})
    if left is None:
        with pytest.raises(ConfigError, match=r"skip: 'nothing\*' matches no linear layer"):
            quantize_model(model, skip=skip)
        assert type(model[0]) is nn.Linear
    else:
        assert list(quantize_model(model, skip=skip).replaced) == left


def test_a_second_call_quantizes_the_rest() -> None:
    model = small_model()
    quantize_model(model, "nvfp4", skip=("0",))
    found = quantize_model(model, "tensorwise")
    assert found.replaced == ("0",) and found.skipped == {"2": "quantized already, with recipe nvfp4"}


def test_torch_s_encoder_is_quantized_in_evaluation_too() -> None:
    """Its fast path multiplies the weights of its linears itself."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
    plain, x = copy.deepcopy(model).eval(), torch.randn(2, 5, 64)
    found = quantize_model(model, "nvfp4")
    assert found.replaced == ("linear1", "linear2")
    assert "without calling a linear layer" in found.skipped["self_attn"]
    with torch.no_grad():
        assert (model.eval()(x) - plain(x)).abs().max() > 0.01


def test_transformers_models() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(intermediate_size=128, **sizes))
    found = quantize_model(model, "mxfp8")
    assert len(found.replaced) == 2 * 7 and found.skipped == {"lm_head": "skip has 'lm_head'"}
    tokens = torch.arange(48).view(2, 24)
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert model.model.layers[1].mlp.down_proj.weight.grad.abs().sum() > 0

    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_positions=64, **sizes))
    with pytest.raises(ConfigError, match="no layer of GPT2LMHeadModel can be quantized(.|\n)*8 skipped.*Conv1D"):
        quantize_model(gpt2)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"recipe": "nvfp5"}, "'nvfp5' is not a recipe; recipes: tensorwise"),
        ({"recipe": "nvfp4", "format": "e4m3"}, "format 'e4m3': recipe nvfp4 has e2m1"),
        ({"recipe": "delayed", "fp8_amax_history": 3}, "did you mean fp8_amax_history_len?"),
        ({"recipe": "delayed", "fp8_amax_history_len": 0}, "fp8_amax_history_len=0: must be at least 1"),
        ({"recipe": "delayed", "fp8_amax_history_len": "4"}, "fp8_amax_history_len='4': must be of type int"),
        ({"recipe": "delayed", "fp8_amax_compute_algo": "mean"}, "must be one of most_recent, max"),
        ({"recipe": "quartet2"}, "in_features 64 is no multiple of 128, which recipe quartet2 needs"),
        ({"recipie": "nvfp4"}, "did you mean recipe?"),
        ({"dtype": torch.float64}, "parameters are torch.float64; must be one of torch.float32"),
    ],
)
def test_errors_of_arguments(arguments: dict, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        QuantizedLinear(64, 128, **arguments)
    assert text in str(error.value)


def test_errors_of_inputs() -> None:
    layer = QuantizedLinear(32, 32)
    with pytest.raises(TypeError, match=r"input is torch.bfloat16, weight torch.float32"):
        layer(torch.ones(2, 32, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match=r"parameters are torch.float64"):
        layer.double()(torch.ones(2, 32, dtype=torch.float64))
    with pytest.raises(ConfigError, match=r"skip is the string 'lm_head': give a tuple"):
        quantize_model(Tied(), skip="lm_head")


def test_the_module_is_in_the_public_interface() -> None:
    assert megafp8.QuantizedLinear is QuantizedLinear and megafp8.quantize_model is quantize_model
