"""What `gpu_matrix.py` measures: the features of dense models, one at a time and in pairs, and their flags.

A block is a model with some features, and its sides are BF16, FP8 and other precisions, and the peer where it can do
the same. The features of FEATURES are also combined: every two levels of two of them are in one block of
`covering_array`. ALONE has what only changes the default model, LAYOUTS what needs two GPUs.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import gpu_layout_rows
from benchmarks.gpu_train import COMMON, NO_DROPOUT
from benchmarks.matrix import BASE

FP8 = "delayed"  # --fp8-format's default recipe
EMULATED_COST = 5
"""Of an emulated step, to one of Transformer Engine; a rough estimate for --plan."""


class Shape(NamedTuple):
    """A default model.

    Attributes:
        tokens: of a microbatch.
        divisor: of lengths and of the vocabulary.
        us_a_token: of an FP8 step on an H200, roughly; for the plan.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    tokens: int
    divisor: int = 1
    us_a_token: float = 0.0


SHAPES = {
    "400m": Shape(24, 1024, 2816, 16, 16_384, us_a_token=4.5),
    "8b x 2": Shape(2, 4096, 14_336, 32, 8192, us_a_token=7.0),
}
TINY = "tiny"
SHAPES[TINY] = Shape(4, 128, 384, 8, 128, divisor=32, us_a_token=500.0)

SHARDED = "--use-distributed-optimizer"  # the default on GPUs only
LOW_PRECISION = f"{SHARDED} --use-precision-aware-optimizer"


class Level(NamedTuple):
    """A choice for a feature.

    Attributes:
        flags: of megafp8.
        peer: changes of the peer's shape (`megatron_loop.py`); None if it cannot do this.
    """

    flags: str
    peer: Optional[Mapping[str, Any]] = None


def activation(name: str) -> dict[str, Any]:
    """The peer's MLP without a gate, by the name of its function."""
    return {"gated_linear_unit": False, "activation_func": name, "bias_activation_fusion": False}


def recomputed(granularity: str, flags: str, **peer: Any) -> Level:
    """Recomputation of activations."""
    return Level(f"--recompute-granularity {granularity} {flags}", {"recompute_granularity": granularity, **peer})


# The first level is the default. Sizes of batches, whose levels have no flags, are in `Block`.
FEATURES: dict[str, dict[str, Level]] = {
    "activation": {
        "SwiGLU": Level("--swiglu", {}),
        "GELU": Level("", activation("gelu")),
        "squared ReLU": Level("--squared-relu", activation("squared_relu")),
    },
    "norm": {
        "RMSNorm": Level("--normalization RMSNorm", {}),
        "LayerNorm": Level("--normalization LayerNorm", {"normalization": "LayerNorm"}),
    },
    "biases": {
        "none": Level("--disable-bias-linear", {}),
        "all": Level("", {"add_bias_linear": True}),
        "QKV": Level("--disable-bias-linear --add-qkv-bias", {"add_qkv_bias": True}),
    },
    "positions": {
        "rope": Level("--position-embedding-type rope", {}),
        "learned": Level(
            "--position-embedding-type learned_absolute",
            {"apply_rope_fusion": False, "model": {"position_embedding_type": "learned_absolute"}},
        ),
    },
    "dropout": {
        "0": Level(NO_DROPOUT, {}),
        "0.1": Level(
            "--attention-dropout 0.1 --hidden-dropout 0.1", {"attention_dropout": 0.1, "hidden_dropout": 0.1}
        ),
    },
    "heads": {
        "GQA": Level("--group-query-attention --num-query-groups 8", {"num_query_groups": 8}),
        "MQA": Level("--group-query-attention --num-query-groups 1", {"num_query_groups": 1}),
        "MHA": Level("", {}),
    },
    "QK-norm": {"off": Level("", {}), "on": Level("--qk-layernorm", {"qk_layernorm": True})},
    "window": {"off": Level("", {}), "512": Level("--window-size 512,0", {"window_size": (512, 0)})},
    "embeddings": {
        "untied": Level("--untie-embeddings-and-output-weights", {}),
        "tied": Level("", {"model": {"share_embeddings_and_output_weights": True}}),
    },
    "documents": {"joined": Level("", {}), "masked": Level("--reset-attention-mask --eod-mask-loss")},
    "recomputed": {
        "nothing": Level("", {}),
        "layers": recomputed(
            "full", "--recompute-method uniform --recompute-num-layers 1", recompute_method="uniform",
            recompute_num_layers=1,
        ),
        "attention": recomputed("selective", "--recompute-modules core_attn", recompute_modules=["core_attn"]),
    },
    "vocabulary": {"50304": Level("", {}), "50002": Level("", {})},
    "length": {"2048": Level("", {}), "512": Level("", {}), "8192": Level("", {}), "2000": Level("", {})},
    "micro-batch": {"full": Level("", {}), "1": Level("", {})},
    "accumulation": {"1": Level("", {}), "16": Level("", {})},
}  # fmt: skip


def moments(first: str, second: str, **peer: Any) -> Level:
    """Adam's moments in other dtypes, the peer's by torch's names."""
    flags = f"{LOW_PRECISION} --exp-avg-dtype {first} --exp-avg-sq-dtype {second}"
    return Level(flags, {"optimizer": {"use_precision_aware_optimizer": True, **peer}})


LATENT = {
    "multi_latent_attention": True, "q_lora_rank": 768, "kv_lora_rank": 256, "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64, "v_head_dim": 128, "rope_type": "rope", "apply_rope_fusion": False,
}  # fmt: skip
# What changes the default model alone.
ALONE = {
    "latent attention": Level(
        "--multi-latent-attention --q-lora-rank 768 --kv-lora-rank 256 --rope-type rope", LATENT
    ),
    "windows in 3 of 4 layers": Level("--window-size 512,0 --window-attn-skip-freq 4"),
    "attention logits softly capped": Level("--attention-logit-softcapping 50"),
    "output logits softly capped": Level("--output-logit-softcapping 30"),
    "learnable softmax": Level("--softmax-type learnable", {"softmax_type": "learnable"}),
    "multi-token prediction": Level("--mtp-num-layers 1"),
    "largest attention logit": Level("--log-max-attention-logit"),
    "QK-clip": Level("--qk-clip"),
    "EMA": Level("--ema-decay 0.99 --ema-interval 1"),
    "EMA in BF16": Level("--ema-decay 0.99 --ema-interval 1 --ema-dtype bf16"),
    "SGD": Level("--optimizer sgd", {"optimizer": {"optimizer": "sgd", "use_distributed_optimizer": False}}),
    "Muon": Level("--optimizer muon"),
    "BF16 moments": moments("bf16", "bf16", exp_avg_dtype="bfloat16", exp_avg_sq_dtype="bfloat16"),
    "FP16 moments": moments("fp16", "fp16", exp_avg_dtype="float16", exp_avg_sq_dtype="float16"),
    "FP8 moments": moments("fp8", "fp8", exp_avg_dtype="uint8", exp_avg_sq_dtype="uint8"),
    "FP8 and FP16 moments": moments("fp8", "fp16", exp_avg_dtype="uint8", exp_avg_sq_dtype="float16"),
    "FP16 master weights": Level(f"{LOW_PRECISION} --main-params-dtype fp16"),
    "BF16 gradients": Level(f"{LOW_PRECISION} --main-grads-dtype bf16 --grad-reduce-in-bf16"),
    "optimizer in several passes": Level("--no-one-pass-optimizer"),
    "optimizer not sharded": Level(
        "--no-use-distributed-optimizer", {"optimizer": {"use_distributed_optimizer": False}}
    ),
    "performance max": Level("--performance max"),
    # Not in FEATURES: it is refused with biases.
    "recomputed MLP": recomputed("selective", "--recompute-modules mlp", recompute_modules=["mlp"]),
    "offload": Level("--fine-grained-activation-offloading --offload-modules core_attn attn_proj"),
    "unchecked gradients": Level("--no-check-for-nan-in-loss-and-grad"),
    "norms and zeros": Level("--log-params-norm --log-num-zeros-in-grad"),
    "energy": Level("--log-energy"),
    "spikes": Level("--spike-policy skip --max-skipped-steps 10"),
    "deterministic": Level("--deterministic-mode"),
    "no graph": Level("--cuda-graph-impl none"),
    "separate kernels": Level("--no-use-transformer-engine-op-fuser --no-cross-entropy-loss-fusion"),
}  # fmt: skip
WEIGHTS = f"{SHARDED} --fp8-param-gather"
FP8_WEIGHTS = {f"{recipe} weights": f"{recipe} {WEIGHTS}" for recipe in ("tensorwise", FP8)}
# Modes beside the default model's BF16, by their names. What Hopper has no GEMMs for is emulated there.
FORMATS = {
    "formats": {
        "tensorwise": "tensorwise", "tensorwise-e4m3": "tensorwise-e4m3", "delayed-e4m3": "delayed-e4m3",
        "blockwise": "blockwise", "@tensorwise": "@tensorwise", "@tensorwise-e4m3": "@tensorwise-e4m3",
        "@delayed-e4m3": "@delayed-e4m3", "@blockwise": "@blockwise",
    },
    "emulated formats": {
        "emulated delayed": "delayed --transformer-impl emulated",
        "emulated delayed e5m2": "delayed --fp8-format e5m2 --transformer-impl emulated",
        "rowwise": "bf16 --fp8-format e4m3 --fp8-recipe rowwise",
        "rowwise hybrid": "bf16 --fp8-format hybrid --fp8-recipe rowwise",
        "mxfp8": "bf16 --fp8-format e4m3 --fp8-recipe mxfp8",
        "mxfp8 hybrid": "bf16 --fp8-format hybrid --fp8-recipe mxfp8",
        "blockwise FP32 scales": "blockwise --fp8-block-scaling-fp32-scales --transformer-impl emulated",
    },
    "emulated FP4": {
        name: f"bf16 --fp4-format e2m1 {flags}"
        for name, flags in {
            "nvfp4": "--fp4-recipe nvfp4",
            "nvfp4 four-over-six": "--fp4-recipe nvfp4 --fp4-four-over-six",
            "nvfp4 no Hadamard": "--fp4-recipe nvfp4 --no-fp4-hadamard",
            "nvfp4 to nearest": "--fp4-recipe nvfp4 --no-fp4-stochastic-rounding",
            "nvfp4 1D weights": "--fp4-recipe nvfp4 --no-fp4-2d-weights",
            "quartet2": "--fp4-recipe quartet2",
        }.items()
    },
    "FP8 weights": {
        **FP8_WEIGHTS, "blockwise weights": f"blockwise {WEIGHTS}",
        "FP8-LM O1": f"{FP8} --fp8-lm-level O1", "FP8-LM O2": f"{FP8} --fp8-lm-level O2",
        "FP8-LM O3": f"{FP8} --fp8-lm-level O3",
        "saved norms": f"{FP8} --fp8-saved-activations norm",
        "saved norms, activations": f"{FP8} --fp8-saved-activations norm activation",
    },
    "statistics": {
        "delayed statistics": f"{FP8} --fp8-log-interval 1",
        "tensorwise statistics": "tensorwise --fp8-log-interval 1",
        "statistics of one layer": f"{FP8} --fp8-log-interval 1 --fp8-log-layers layers.0.*",
        "what if": f"{FP8} --fp8-log-interval 1 --fp8-what-if mxfp8,nvfp4",
        "guard": f"{FP8} --fp8-guard warn --fp8-guard-interval 1",
        "guard bf16-layer": f"{FP8} --fp8-guard bf16-layer --fp8-guard-interval 1",
        "guard smooth-swiglu": "tensorwise --fp8-guard smooth-swiglu --fp8-guard-interval 1",
        "counters that skip": f"{FP8} --on-nonfinite-activation skip --max-skipped-steps 10",
        "counters that change layers": f"{FP8} --on-nonfinite-activation bf16 --max-skipped-steps 10",
    },
    "precision maps": {
        "layers in BF16": "tensorwise --precision layers.0.*=bf16",
        "fc2 in BF16": "tensorwise --precision *.linear_fc2=bf16",
        "backward in BF16": "tensorwise --precision *:dgrad,wgrad=bf16",
        "wgrad in BF16": "tensorwise --precision *:wgrad=bf16",
        "first and last in BF16": "tensorwise --first-last-layers-bf16",
        "delayed, layers in BF16": f"{FP8} --precision layers.0.*=bf16",
        "delayed, output in FP8": f"{FP8} --precision output_layer=tensorwise",
        "BF16 first": f"{FP8} --fp8-schedule bf16:2,fp8",
        "delayed scales from 1": f"{FP8} --fp8-delayed-start te",
    },
}  # fmt: skip
# With 128 channels a head, which FP8 attention needs on Hopper.
ATTENTION = {"FP8 attention": f"{FP8} --fp8-dot-product-attention"}


class Layout(NamedTuple):
    """Two ranks.

    Attributes:
        division: fields of the peer's `Division`; None if it cannot divide so.
        levels: that differ from the default: a pipeline has microbatches.
        modes: beside BF16 and FP8.
    """

    flags: str
    data_parallel: int = 1
    division: Optional[Mapping[str, int]] = None
    levels: Mapping[str, str] = {}
    modes: Mapping[str, str] = {}


PIPELINE = {"accumulation": "16"}
LAYOUTS = {
    "DP 2": Layout("", 2, {}, modes={
        **FP8_WEIGHTS, "BF16 gradients": f"{FP8} --grad-reduce-in-bf16",
        "FP8 gradients": f"{FP8} --grad-reduce-in-fp8", "FP8-LM O3": f"{FP8} --fp8-lm-level O3",
        "local amaxes": f"{FP8} --tp-only-amax-red",
        "compared weights": f"{FP8} --check-weight-hash-across-dp-replicas-interval 1",
    }),
    "DP 2 not sharded": Layout("--no-use-distributed-optimizer", 2),
    "TP 2, SP": Layout(gpu_layout_rows.LAYOUTS["TP 2"].flags, 1, {"tensor": 2}, modes=FP8_WEIGHTS),
    "TP 2": Layout("--tensor-model-parallel-size 2"),
    "TP 2 overlapped": Layout(gpu_layout_rows.LAYOUTS["TP 2 overlapped"].flags),
    **{name: Layout(gpu_layout_rows.LAYOUTS[name].flags) for name in ("CP 2", "CP 2 a2a", "CP 2 allgather")},
    "PP 2": Layout("--pipeline-model-parallel-size 2", 1, {"pipeline": 2}, PIPELINE),
    "VPP 2": Layout(
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", levels=PIPELINE
    ),
    "FSDP 2": Layout(
        "--use-torch-fsdp2 --make-vocab-size-divisible-by 2", 2,
        modes={"tensorwise weights": "tensorwise --fp8-param-gather"},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Block:
    """A model and what is measured of it.

    Attributes:
        levels: those that differ from the default.
        extra: more flags.
        peer: changes of the peer's shape beside those of the levels; None if it cannot do this.
        modes: sides beside BF16 and FP8, by name.
        layout: of two ranks; None for one.
    """

    shape: str
    name: str
    levels: Mapping[str, str] = field(default_factory=dict)
    extra: str = ""
    peer: Optional[Mapping[str, Any]] = None
    modes: Mapping[str, str] = field(default_factory=dict)
    has_fp8: bool = True
    layout: Optional[Layout] = None

    @property
    def num_gpus(self) -> int:
        """That it needs."""
        return 1 if self.layout is None else 2

    @property
    def sides(self) -> dict[str, str]:
        """RECIPE FLAGS by name, in the order of measurements; @RECIPE is the peer."""
        usual = (BASE, FP8) if self.has_fp8 else (BASE,)
        peers = [] if self.peer is None else [f"@{recipe}" for recipe in usual]
        return {name: name for name in (*usual, *peers)} | dict(self.modes)

    def level(self, feature: str) -> str:
        """Its name."""
        return self.levels.get(feature, next(iter(FEATURES[feature])))

    @property
    def length(self) -> int:
        """Tokens of a sequence; a multiple of 16, which FP8 needs of a microbatch."""
        return int(self.level("length")) // SHAPES[self.shape].divisor // 16 * 16

    @property
    def vocabulary(self) -> int:
        """Tokens, with the one that ends a document."""
        return int(self.level("vocabulary")) // SHAPES[self.shape].divisor

    @property
    def accumulation(self) -> int:
        """Microbatches of a step."""
        return int(self.level("accumulation"))

    @property
    def micro_batch(self) -> int:
        """Sequences. Many microbatches are smaller ones, so that a step does not take long."""
        tokens = SHAPES[self.shape].tokens // (4 if self.accumulation > 1 else 1)
        return 1 if self.level("micro-batch") == "1" else max(1, tokens // self.length)

    @property
    def tokens(self) -> int:
        """Of a step and GPU."""
        ranks = 1 if self.layout is None else self.layout.data_parallel
        return self.length * self.micro_batch * self.accumulation * ranks // self.num_gpus

    @property
    def flags(self) -> str:
        """Of the model, the batch and the layout."""
        shape, layout = SHAPES[self.shape], self.layout or Layout("")
        sequences = self.micro_batch * self.accumulation * layout.data_parallel
        sizes = (
            f"--num-layers {shape.layers} --hidden-size {shape.hidden} --ffn-hidden-size {shape.ffn} "
            f"--num-attention-heads {shape.heads} --vocab-size {self.vocabulary - 1} --make-vocab-size-divisible-by 1 "
            f"--seq-length {self.length} --max-position-embeddings {self.length} "
            f"--micro-batch-size {self.micro_batch} --global-batch-size {sequences}"
        )
        chosen = (FEATURES[feature][self.level(feature)].flags for feature in FEATURES)
        return " ".join(f"{sizes} {' '.join(chosen)} {COMMON} {layout.flags} {self.extra}".split())

    @property
    def own_flags(self) -> list[str]:
        """Those that the default does not have: a warning that has one of them names the block."""
        layout = "" if self.layout is None else self.layout.flags
        changed = (FEATURES[feature][level].flags for feature, level in self.levels.items())
        words = f"{' '.join(changed)} {layout} {self.extra}".split()
        return [word for word in words if word.startswith("--")]

    def peer_changes(self) -> dict[str, Any]:
        """Changes of the peer's shape."""
        shape = SHAPES[self.shape]
        changes: dict[str, Any] = {
            "num_layers": shape.layers, "hidden_size": shape.hidden, "ffn_hidden_size": shape.ffn,
            "num_attention_heads": shape.heads, "seq": self.length, "batch": self.micro_batch,
            "microbatches": self.accumulation,
        }  # fmt: skip
        model: dict[str, Any] = {"vocab_size": self.vocabulary}
        for feature in FEATURES:
            changes |= (chosen := dict(FEATURES[feature][self.level(feature)].peer or {}))
            model |= chosen.get("model", {})
        return changes | dict(self.peer or {}) | {"model": model}


def blocks(shapes: Sequence[str]) -> list[Block]:
    """All of them; the default, with which others are compared, first."""
    found = [Block(shape, "default", peer={}) for shape in shapes]
    for shape in shapes:
        found += [Block(shape, name, modes=modes, has_fp8=False) for name, modes in FORMATS.items()]
        found += singles(shape)
        if SHAPES[shape].hidden // SHAPES[shape].heads == 128:
            found.append(Block(shape, "FP8 attention", modes=ATTENTION, has_fp8=False))
    rows = covering_array({"shape": list(shapes)} | {name: list(levels) for name, levels in FEATURES.items()})
    for number, row in enumerate(rows, start=1):
        changed = {
            name: level for name, level in row.items() if name != "shape" and level != next(iter(FEATURES[name]))
        }
        found.append(Block(row["shape"], f"pairs {number}", changed))
    for name, layout in LAYOUTS.items():
        peer = None if layout.division is None else {}
        found.append(Block(shapes[0], name, layout.levels, peer=peer, modes=layout.modes, layout=layout))
    return found


def singles(shape: str) -> Iterator[Block]:
    """The default model with one change."""
    for feature, levels in FEATURES.items():
        for name, level in list(levels.items())[1:]:
            peer = None if level.peer is None else {}  # that of the level
            yield Block(shape, f"{feature} {name}", {feature: name}, peer=peer)
    for name, level in ALONE.items():
        # Every head of latent attention has keys of its own.
        levels = {"heads": "MHA"} if "latent" in name else {}
        yield Block(shape, name, levels, level.flags, level.peer)


def covering_array(factors: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """Rows that have every two levels of every two factors, few by a greedy choice; always the same ones."""
    pairs = dict.fromkeys(
        frozenset({(one, a), (other, b)})
        for one, other in itertools.combinations(factors, 2)
        for a, b in itertools.product(factors[one], factors[other])
    )
    rows = []
    while pairs:
        row = dict(sorted(next(iter(pairs))))
        for factor in (factor for factor in factors if factor not in row):

            def gain(level: str, factor: str = factor, row: dict[str, str] = row) -> int:
                return sum(frozenset({(factor, level), chosen}) in pairs for chosen in row.items())

            row[factor] = max(factors[factor], key=gain)
        rows.append({factor: row[factor] for factor in factors})
        for covered in itertools.combinations(row.items(), 2):
            pairs.pop(frozenset(covered), None)
    return rows
