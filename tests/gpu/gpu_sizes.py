"""The small model of the GPU tests, and the recipes of a Hopper GPU."""

# Wide enough for fused attention and for every recipe's blocks. Tests of fused operations enable them.
SIZES = (
    "--num-layers 2 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 4 --seq-length 128 --vocab-size 255 "
    "--make-vocab-size-divisible-by 128 --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
    "--tokenizer-type NullTokenizer --mock-data --num-workers 0 --micro-batch-size 4 --global-batch-size 8 "
    "--train-iters 100 --lr 1e-3 --lr-decay-style constant --adam-beta2 0.95 --weight-decay 0.1 --num-threads 1 "
    "--eval-iters 2 --clip-grad 0.5 --use-distributed-optimizer --no-use-transformer-engine-op-fuser"
)
RECIPES = {
    "bf16": "",
    "tensorwise": "--fp8-format hybrid --fp8-recipe tensorwise",
    "delayed": "--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 16 --fp8-amax-compute-algo max",
    "blockwise": "--fp8-format e4m3 --fp8-recipe blockwise",
}
FP8_RECIPES = tuple(name for name in RECIPES if name != "bf16")
ATTENTION_OPTIONS = {
    "window": "--window-size 24,0",
    "windows of some layers": "--window-size 24,0 --window-attn-skip-freq 2",
    "off by one": "--softmax-type off-by-one",
    "learnable offsets": "--softmax-type learnable",
    "offsets and windows": "--softmax-type learnable --window-size 24,0",
    "yarn": (
        "--position-embedding-type yarn --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 32 "
        "--max-position-embeddings 128"
    ),
    "no rotation in some layers": "--no-rope-freq 2",
}
