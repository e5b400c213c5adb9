#!/usr/bin/env bash
# The loss report of one H200, in pieces of at most ten minutes: each command trains one run of one size, and ends with
# status 75 if it needs another call, which resumes it.
#
#   bash examples/loss_report_h200.sh data                  text, tokenizer and shards; once
#   bash examples/loss_report_h200.sh small bf16 1          50M parameters, 6,200 steps of 65,536 tokens: 406M tokens
#   bash examples/loss_report_h200.sh large delayed 2       374M parameters, 1,500 steps of 65,536 tokens
#   bash examples/loss_report_h200.sh mixture delayed 2     16 experts, 303M of 907M parameters for a token, 240 steps of
#                                                           65,536 tokens; FP8 in E4M3
#   bash examples/loss_report_h200.sh queue small "bf16 delayed" "1 2"   runs that are not done, seed by seed, for
#                                                           QUEUE_MINUTES (9); the last one saves and ends with status
#                                                           75, and the same command resumes it. Queues side by side,
#                                                           one for each GPU (CUDA_VISIBLE_DEVICES), share the runs; 75
#                                                           is also the status if another queue still trains one
#   bash examples/loss_report_h200.sh records               the records of what is done, without checkpoints, packed into
#                                                           records.tar.gz: unpacked in OUT of another machine, its
#                                                           queue leaves these runs out
#   bash examples/loss_report_h200.sh report                a report of each size, from the records, on any machine
#
# The levels of FP8-LM, with GPUS=2: `GPUS=2 bash examples/loss_report_h200.sh small O3 1`, beside bf16 with GPUS=2.
#
# The report needs: small with bf16, bf16-control, delayed, tensorwise and blockwise for seeds 1 to 5, and mxfp8 and
# nvfp4 (emulated) for seed 1; large with bf16, delayed and tensorwise for seeds 1 and 2; mixture with bf16,
# bf16-control, delayed and tensorwise for seeds 1 to 3. `explain` in place of a size trains 50M parameters for 800
# steps: delayed, delayed-te-start and delayed-no-graph tell whether the scales of the start or the graph make its
# difference to bf16 and bf16-no-graph; the data order is the same within a seed.
#
# The text is the source of the Python packages of this machine, as much of it as there is (MAX_BYTES at most): the
# largest text that packages bring. A run prints how many epochs it reads. TINY=1 tries all of it
# on a CPU in minutes. Environment variables: OUT (default runs/loss_report), MAX_BYTES, MINUTES of a call (default 8),
# GPUS of a run (default 1), and for a shorter report STEPS and BATCH (sequences a step). Further arguments are flags of
# the run.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/setup_venv.sh

out=${OUT:-runs/loss_report}
data=$out/data
what=${1:?data, small, large, mixture, explain, queue, records or report}
tokenizer=(--tokenizer-type SentencePieceTokenizer --tokenizer-model "$data/tokenizer.model")
vocabulary=${TINY:+1000}
vocabulary=${vocabulary:-16384}

if [ "$what" = data ]; then
  mkdir -p "$data"
  packages=$("$PYTHON" -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))')
  bytes=${TINY:+2000000}
  "$PYTHON" tools/build_stdlib_corpus.py --output "$data/corpus.jsonl" --folder "$packages" \
    --max-bytes "${MAX_BYTES:-${bytes:-2000000000}}"
  "$PYTHON" tools/train_tokenizer.py --input "$data/corpus.jsonl" --vocab-size "$vocabulary" \
    --max-text-bytes 20000000 --model-prefix "$data/tokenizer"
  exec "$PYTHON" tools/preprocess_data.py --input "$data/corpus.jsonl" --output-prefix "$data/packages" --append-eod \
    --workers "$(nproc)" "${tokenizer[@]}"
fi

if [ "$what" = report ]; then
  for size in small large mixture explain; do
    if compgen -G "$out/$size/*/seed*" >/dev/null; then
      "$PYTHON" tools/compare_runs.py "$out/$size"/*/seed* --baseline bf16 --bound 0.5 --output-dir "$out/$size/report"
    fi
  done
  exit
fi

is_done() { grep -qs '"state": "done"' "$1/run_state.json"; }

if [ "$what" = records ]; then
  cd "$out"
  for run in {small,large,mixture,explain}/*/seed*; do
    if is_done "$run"; then printf '%s\n' "$run"/{config,run_state}.json "$run/records.jsonl"; fi
  done | tar -czf records.tar.gz --files-from -
  exit
fi

if [ "$what" = queue ]; then
  left=0
  for seed in ${4:?seeds}; do
    for recipe in ${3:?recipes}; do
      run=$out/${2:?a size}/$recipe/seed$seed
      is_done "$run" && continue
      export SECONDS_LEFT=$((60 * ${QUEUE_MINUTES:-9} - SECONDS))
      [ "$SECONDS_LEFT" -ge 60 ] || exit 75 # a start takes as long
      mkdir -p "$run"
      status=0
      flock --nonblock --conflict-exit-code 3 "$run/queue.lock" \
        bash examples/loss_report_h200.sh "$2" "$recipe" "$seed" "${@:5}" || status=$?
      if [ "$status" = 3 ]; then # another queue has this run
        left=75
      elif ! is_done "$run"; then
        [ "$SECONDS" -lt $((60 * ${QUEUE_MINUTES:-9})) ] || exit 75 # torchrun ends with 1 when it is stopped
        exit "$status"
      fi
    done
  done
  exit "$left"
fi

recipe=${2:?a recipe}
seed=${3:?a seed}
warmup=0.05
case $what in
  small) steps=6200 rate=1.2e-3 sizes=(--num-layers 8 --hidden-size 576 --num-attention-heads 9 --ffn-hidden-size 1536) ;;
  large) steps=1500 rate=6e-4 sizes=(--num-layers 25 --hidden-size 1024 --num-attention-heads 16 --ffn-hidden-size 3072) ;;
  mixture) steps=240 rate=4e-4 warmup=0.2 sizes=(--num-layers 16 --hidden-size 1024 --num-attention-heads 16) ;;
  explain) steps=800 rate=1.2e-3 sizes=(--num-layers 8 --hidden-size 576 --num-attention-heads 9 --ffn-hidden-size 1536) ;;
  *) echo "$what: choose from data, small, large, mixture, explain, queue, records and report" >&2; exit 64 ;;
esac
length=1024 batch=${BATCH:-64} eval_iters=20
steps=${STEPS:-$steps}
micro=$((batch / ${GPUS:-1} < 32 ? batch / ${GPUS:-1} : 32))
experts=() format=hybrid width=1024
if [ -n "${TINY:-}" ]; then
  steps=20 length=64 micro=4 batch=8 eval_iters=2
  sizes=(--num-layers 2 --hidden-size 64 --num-attention-heads 2 --ffn-hidden-size 160) width=64
fi
if [ "$what" = mixture ]; then
  micro=$((micro / 2)) format=e4m3 # grouped FP8 GEMMs are in E4M3
  experts=(--num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size "$width" --moe-aux-loss-coeff 0.01
    --moe-token-dispatcher-type alltoall --moe-grouped-gemm)
fi
flags=(--bf16)
case $recipe in
  bf16*) ;;
  nvfp4*) flags+=(--recipe nvfp4 --transformer-impl emulated) ;;
  mxfp8) flags+=(--recipe mxfp8 --transformer-impl emulated) ;;
  blockwise | tensorwise) flags+=(--recipe "$recipe") ;;
  # Not --recipe delayed: the report was made with Megatron-LM's defaults, a history of 1.
  delayed*) flags+=(--fp8-format "$format" --fp8-recipe delayed) ;;
  O[123]) flags+=(--fp8-lm-level "$recipe") ;;
  *) echo "$recipe: choose from the recipes above" >&2; exit 64 ;;
esac
case $recipe in
  bf16-control) micro=$((micro / 2)) ;; # the same gradients, summed in another order
  *-te-start) flags+=(--fp8-delayed-start te) ;;
  *-no-graph) flags+=(--cuda-graph-impl none) ;;
esac
run=$out/$what/$recipe/seed$seed
interval=$((steps / 20))
ranks=()
if [ "${GPUS:-1}" -gt 1 ]; then
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # torchrun sets this and warns that it does
  ranks=(-m torch.distributed.run --standalone --nproc-per-node "$GPUS")
fi

timeout --preserve-status "${SECONDS_LEFT:-0}" "$PYTHON" "${ranks[@]}" pretrain_gpt.py "${flags[@]}" "${sizes[@]}" "${experts[@]}" --seq-length "$length" --max-position-embeddings "$length" \
  --position-embedding-type rope --normalization RMSNorm --swiglu --qk-layernorm --disable-bias-linear \
  --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 \
  --micro-batch-size "$micro" --global-batch-size "$batch" --train-iters "$steps" --seed "$seed" \
  --lr "$rate" --min-lr 0 --lr-decay-style cosine --lr-warmup-fraction "$warmup" \
  --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --eval-interval "$interval" --eval-iters "$eval_iters" \
  --log-interval 50 --exit-duration-in-mins "${MINUTES:-8}" "${tokenizer[@]}" \
  --data-path "$data/packages_text_document" --split 97,3,0 --data-cache-path "$data/cache" \
  --save "$run" --load "$run" --save-interval 100000 --ckpt-keep 1 "${@:4}"
is_done "$run" || { echo "$run: not done, run it again" >&2; exit 75; }
