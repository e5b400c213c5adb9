#!/usr/bin/env bash
# The commands of the page, by its sections.

# The table of costs. The order is that of use: what time does not allow is left out at its end.
D="--bf16 --recipe delayed" E="--transformer-impl emulated"
megafp8 run-comparison --forks 400 --fork-length 200 --seeds 6 --parallel 5 --runs-per-gpu 5 --output-dir runs/forks51 \
    --recipes bf16,tensorwise,delayed,blockwise --variant mxfp8-emulated="--bf16 --recipe mxfp8 $E" \
    --variant nvfp4-emulated="--bf16 --recipe nvfp4 $E" \
    --variant nvfp4-four-over-six="--bf16 --recipe nvfp4 --fp4-four-over-six $E" \
    --variant output-layer="$D --precision output_layer=tensorwise" \
    --variant moments-bf16="--bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16" -- \
    --num-layers 8 --hidden-size 576 --num-attention-heads 9 --ffn-hidden-size 1536 --seq-length 1024 \
    --max-position-embeddings 1024 --position-embedding-type rope --normalization RMSNorm --swiglu --qk-layernorm \
    --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 \
    --use-distributed-optimizer --micro-batch-size 32 --global-batch-size 32 --train-iters 1200 --eval-iters 16 \
    --lr 1e-3 --min-lr 0 --lr-decay-style cosine --lr-warmup-fraction 0.05 --weight-decay 0.1 --adam-beta2 0.95 \
    --clip-grad 1.0 --log-interval 10 --num-workers 1 --split 98,2,0 --tokenizer-type SentencePieceTokenizer \
    --tokenizer-model runs/loss_report/data/tokenizer.model \
    --data-path runs/loss_report/data/packages_text_document    # of `examples/loss_report_h200.sh data`

# Whole runs
bash examples/loss_report_h200.sh queue small "bf16 delayed tensorwise blockwise bf16-control" "1 2 3 4 5" --eval-iters 8
MINUTES=20 QUEUE_MINUTES=20 bash examples/loss_report_h200.sh queue small "mxfp8 nvfp4" 1 --eval-iters 8

# Other lengths and sizes on GPUs
GPUS=4 MAX_BYTES=400000000 bash examples/loss_report_h200.sh data
GPUS=4 MAX_BYTES=400000000 bash examples/loss_report_h200.sh queue large "bf16 delayed tensorwise" 1 --eval-iters 4
SEEDS=1 RECIPES=bf16,delayed,tensorwise,blockwise bash examples/compare_recipes_h200.sh

# Mixtures
for seed in 1 2 3; do for recipe in bf16 tensorwise; do
  bash examples/loss_report_h200.sh mixture $recipe $seed --eval-interval 60 --eval-iters 10
done; done

# Emulated, on a CPU
bash examples/compare_recipes.sh

# `--performance max`
D="--bf16 --fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 1024 --fp8-amax-compute-algo max"
M="--use-distributed-optimizer --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
megafp8 run-comparison --output-dir runs/max --seeds 10 --recipes tensorwise --variant delayed="$D" \
    --variant delayed-out="$D --precision output_layer=tensorwise" --variant moments="$D $M" \
    --variant both="$D $M --precision output_layer=tensorwise" -- FLAGS     # of examples/compare_recipes.sh

# How delayed scaling starts
python benchmarks/delayed_start.py --plot docs/images/delayed_start.png

# Forks on a CPU
megafp8 run-comparison --forks 60,120,180 --fork-length 60 --controls --recipes bf16,tensorwise,mxfp8,nvfp4 --seeds 4 \
    --parallel 2 --size laptop --output-dir runs/forks -- --num-layers 2 --hidden-size 64 --num-attention-heads 2 \
    --ffn-hidden-size 192 --seq-length 128 --global-batch-size 8 --train-iters 240 --lr 1e-3 --eval-iters 32

# Placebos of forks, again until there are 40
python benchmarks/fork_placebos.py --csv benchmarks/results/quality_pairs/fork_placebos.csv
