"""The update of Muon, with a plain version of it, and with torch's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megafp8.config.optimizers import polynomials
from megafp8.config.schema import OptimizerConfig
from megafp8.optimizer import layer_wise
from megafp8.optimizer.build import is_matrix
from megafp8.optimizer.layer_wise import Ownership, adopt_fp8_weights, move_to_buffers
from megafp8.optimizer.muon import IS_MATRIX, Matrix, Muon, MuonSettings, newton_schulz, orthogonalize, shape_scale

RATE, DECAY, STEPS = 0.02, 0.1, 4
QKV = (4, 2, 2)


def settings_of(**changes: Any) -> MuonSettings:
    return MuonSettings.from_config(OptimizerConfig(**({"muon_fp32_matmul_prec": "highest"} | changes)))


def values(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def plain_orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    x = matrix / matrix.norm()
    for a, b, c in polynomials(OptimizerConfig()):
        x = a * x + b * x @ x.T @ x + c * x @ x.T @ x @ x.T @ x
    return x


def plain_muon(weight: torch.Tensor, gradients: list[torch.Tensor], momentum: float, nesterov: bool, scale: float):
    """Several updates in FP64, from the formulas of the documentation."""
    weight, mean = weight.double(), torch.zeros_like(weight, dtype=torch.float64)
    for gradient in map(torch.Tensor.double, gradients):
        mean = momentum * mean + (1 - momentum) * gradient
        direction = momentum * mean + (1 - momentum) * gradient if nesterov else mean
        weight = weight - RATE * DECAY * weight - RATE * scale * plain_orthogonal(direction)
    return weight


@pytest.mark.parametrize("mode", ["spectral", "unit_rms_norm", "shape_scaling"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_updates_are_those_of_the_formulas(nesterov: bool, mode: str) -> None:
    weight, gradients = values((12, 8), 0), [values((12, 8), seed) for seed in range(1, 1 + STEPS)]
    scale = 0.2 * {"spectral": 12**0.5, "unit_rms_norm": 1.5**0.5, "shape_scaling": 1.5**0.5}[mode]
    parameter = torch.nn.Parameter(weight.clone())
    chosen = settings_of(muon_nesterov=nesterov, muon_momentum=0.95, muon_scale_mode=mode, muon_extra_scale_factor=0.2)
    optimizer = Muon(
        [{"params": [parameter], "lr": RATE, "weight_decay": DECAY, IS_MATRIX: True}], {parameter: Matrix()}, chosen
    )
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    expected = plain_muon(weight, gradients, 0.95, nesterov, scale)
    # FP32 against FP64: 1e-5 of an update (test_newton_schulz.py), and two roundings of the weight by up to 2^-24.
    update_norm = RATE * scale * 8**0.5
    assert (
        (parameter - expected).norm() < STEPS * (1e-5 * update_norm + 2 * 2.0**-24 * weight.norm()) < update_norm / 10
    )
    assert torch.equal(gradients[-1], parameter.grad), "gradients are left as they are"
    assert optimizer.param_groups[0]["step"] == STEPS and list(optimizer.state[parameter]) == ["momentum_buffer"]


def test_updates_are_torchs() -> None:
    """torch.optim.Muon has the coefficients of `simple`, in BF16, and the scale `match_rms_adamw` = 0.2 spectral."""
    ours, theirs = (torch.nn.Parameter(values((12, 8), 0)) for _ in range(2))
    chosen = settings_of(
        muon_coefficient_type="simple", muon_momentum=0.95, muon_nesterov=True, muon_extra_scale_factor=0.2,
        muon_fp32_matmul_prec="medium",
    )  # fmt: skip
    groups = [{"params": [ours], "lr": RATE, "weight_decay": DECAY, IS_MATRIX: True}]
    optimizers = (
        Muon(groups, {ours: Matrix()}, chosen),
        torch.optim.Muon(
            [theirs], lr=RATE, weight_decay=DECAY, momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw"
        ),
    )
    for seed in range(1, 1 + STEPS):
        ours.grad = theirs.grad = values((12, 8), seed)
        for optimizer in optimizers:
            optimizer.step()
    # torch rounds the gradient to BF16 before it divides by the norm: one more relative error of 2^-9.
    assert (ours - theirs).norm() < 5 * 2.0**-9 * STEPS * RATE * 0.2 * 12**0.5 * 8**0.5
    assert (ours - values((12, 8), 0)).norm() > 20 * (ours - theirs).norm()


@pytest.mark.parametrize("mode", ["spectral", "unit_rms_norm", "shape_scaling"])
@pytest.mark.parametrize("coefficients", ["simple", "quintic", "polar_express"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_updates_are_those_of_the_package_that_megatron_core_uses(nesterov: bool, coefficients: str, mode: str) -> None:
    package = pytest.importorskip(
        "emerging_optimizers.orthogonalized_optimizers.muon", reason="needs emerging-optimizers, Triton and Python 3.12"
    )
    num_steps = 8 if coefficients == "polar_express" else 5
    ours, theirs = (torch.nn.Parameter(values((12, 8), 0)) for _ in range(2))
    chosen = settings_of(
        muon_coefficient_type=coefficients, muon_num_ns_steps=num_steps, muon_momentum=0.95, muon_nesterov=nesterov,
        muon_scale_mode=mode, muon_extra_scale_factor=0.2,
    )  # fmt: skip
    groups = [{"params": [ours], "lr": RATE, "weight_decay": DECAY, IS_MATRIX: True}]
    optimizers = (
        Muon(groups, {ours: Matrix()}, chosen),
        package.Muon(
            [theirs], lr=RATE, weight_decay=DECAY, momentum=0.95, nesterov=nesterov, fp32_matmul_prec="highest",
            coefficient_type=coefficients, num_ns_steps=num_steps, scale_mode=mode, extra_scale_factor=0.2,
        ),
    )  # fmt: skip
    for seed in range(1, 1 + STEPS):
        ours.grad, theirs.grad = (values((12, 8), seed) for _ in range(2))
        for optimizer in optimizers:
            optimizer.step()
    # Sums of FP32 in two orders.
    assert (ours - theirs).norm() < 1e-4 * (ours - values((12, 8), 0)).norm()


def test_other_weights_are_adamws() -> None:
    parameter, theirs = (torch.nn.Parameter(values((6, 4), 0)) for _ in range(2))
    optimizer = Muon([{"params": [parameter], "lr": RATE, "weight_decay": DECAY}], {}, settings_of())
    reference = torch.optim.AdamW([theirs], lr=RATE, weight_decay=DECAY)
    for seed in range(STEPS):
        parameter.grad = theirs.grad = values((6, 4), seed)
        optimizer.step()
        reference.step()
    torch.testing.assert_close(parameter, theirs, rtol=1e-6, atol=1e-7)


def test_query_key_and_value_are_three_matrices() -> None:
    """The rows of a query group are its queries, its keys and its values."""
    direction = values((3 * sum(QKV), 10), 0)
    groups = direction.view(3, sum(QKV), 10)
    update = orthogonalize(direction, Matrix(qkv_rows=QKV), settings_of()).view(3, sum(QKV), 10)
    for rows in (slice(0, 4), slice(4, 6), slice(6, 8)):
        part = groups[:, rows].reshape(-1, 10)
        expected = newton_schulz(part, settings_of().steps, "highest") * max(part.shape) ** 0.5
        torch.testing.assert_close(update[:, rows].reshape(-1, 10), expected)
    whole = orthogonalize(direction, Matrix(qkv_rows=QKV), settings_of(muon_split_qkv=False))
    torch.testing.assert_close(whole, newton_schulz(direction, settings_of().steps, "highest") * 24**0.5)


def test_stacked_experts_are_matrices_of_their_own() -> None:
    stack = values((3, 6, 4), 0)
    update = orthogonalize(stack, Matrix(), settings_of(muon_scale_mode="unit_rms_norm"))
    for expert, result in zip(stack, update, strict=True):
        torch.testing.assert_close(result, newton_schulz(expert, settings_of().steps, "highest") * 1.5**0.5)


def test_scales_of_shapes() -> None:
    assert shape_scale(9, 4, "spectral") == shape_scale(4, 9, "spectral") == 3
    assert shape_scale(9, 4, "unit_rms_norm") == shape_scale(9, 4, "shape_scaling") == 1.5
    assert shape_scale(4, 16, "unit_rms_norm") == 0.5 and shape_scale(4, 16, "shape_scaling") == 1


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("module.module.decoder.layers.0.self_attention.linear_qkv.weight", (24, 8), True),
        ("decoder.layers.0.mlp.router.weight", (4, 8), True),
        ("decoder.layers.0.mlp.experts.linear_fc1", (4, 16, 8), True),
        ("decoder.layers.0.mlp.linear_fc1.bias", (16,), False),
        ("decoder.layers.0.input_layernorm.weight", (8,), False),
        ("module.module.embedding.word_embeddings.weight", (32, 8), False),
        ("module.embedding.position_embeddings.weight", (32, 8), False),
        ("module.output_layer.weight", (32, 8), False),
    ],
)
def test_matrices_of_layers_are_muons(name: str, shape: tuple[int, ...], expected: bool) -> None:
    assert is_matrix(torch.empty(shape), name) is expected


class Group:
    """A process group of three ranks, as far as a division of weights asks."""

    def size(self) -> int:
        return 3

    def rank(self) -> int:
        return 1


def test_large_weights_go_to_the_rank_with_the_least() -> None:
    weights = [torch.empty(size) for size in (5, 30, 10, 12, 5, 3)]
    ownership = Ownership.divide(weights, Group())
    assert [[weight.numel() for weight in owned] for owned in ownership.owned] == [[30], [12, 5], [10, 5, 3]]
    assert [weight.numel() for weight in ownership.of_this_rank] == [12, 5]
    assert [[len(buffer) for buffer in buffers] for buffers in ownership.buffers] == [[128], [256], [384]]


def test_weights_keep_their_values_in_the_buffers() -> None:
    """Each begins at an aligned element, and a buffer has one dtype."""
    weights = [torch.randn(3, 5), torch.randn(200).bfloat16(), torch.randn(7).bfloat16()]
    before = [weight.clone() for weight in weights]
    fp32, bf16 = move_to_buffers(weights)
    assert all(map(torch.equal, weights, before))
    assert [buffer.dtype for buffer in (fp32, bf16)] == [torch.float32, torch.bfloat16] and len(bf16) == 256 + 128
    bf16.zero_()
    assert not weights[1].any() and not weights[2].any() and weights[0].any()
    assert weights[2].data_ptr() == bf16.data_ptr() + 256 * 2


def test_master_weights_of_fp8_weights_are_their_initial_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Transformer Engine keeps them beside the codes. The update leaves the codes to `Ownership.share`."""
    decoded, plain = torch.nn.Parameter(torch.ones(2).bfloat16()), torch.nn.Parameter(torch.ones(2).bfloat16())
    decoded._high_precision_init_val = torch.tensor([1.0, 1.125]).bfloat16()
    for weight in (decoded, plain):
        weight.main_param = weight.detach().float()
    part = SimpleNamespace(float16_groups=[[decoded], [plain]])
    monkeypatch.setattr(layer_wise, "is_float8tensor", lambda weight: weight is decoded)
    adopt_fp8_weights(part)
    assert decoded.main_param.tolist() == [1.0, 1.125] and plain.main_param.tolist() == [1.0, 1.0]
    for weight in (decoded, plain):
        weight.main_param.add_(1)
    part._copy_main_params_to_model_params()
    assert decoded.tolist() == [1.0, 1.0] and plain.tolist() == [2.0, 2.0]
