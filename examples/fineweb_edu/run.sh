#!/usr/bin/env bash
# FineWeb-Edu (educational web pages), from the Hugging Face Hub to a trained model on one machine: download the text,
# train a tokenizer, create token shards, and pretrain a Llama-style GPT with 1.4 billion parameters in FP8.
#
#   pip install -e '.[datasets]'
#   GIGABYTES=5 bash examples/fineweb_edu/run.sh
#   sbatch examples/fineweb_edu/slurm.sh                  the same as a Slurm job
#
# If it is interrupted, run it again to resume. If the training machine has no network, run the first three steps on
# another machine (STOP_AFTER=shards) and copy OUT. To print the plan of the training on any machine:
#
#   bash examples/fineweb_edu/run.sh --dry-run --world-size 8 --target h200
#
# OUT              folder for everything (default runs/fineweb_edu)
# TEXT             existing folder of Parquet files with a column "text"; nothing is downloaded
# CONFIG           part of the dataset: sample-10BT (default), sample-100BT, sample-350BT, or default (all)
# GIGABYTES        how much text to download (default: all of CONFIG; 10 billion tokens are about 45 GB)
# TOKENIZER_MODEL  folder with a tokenizer.json and tokenizer_config.json (default: one is trained on the text)
# VOCAB_SIZE       vocabulary size of the trained tokenizer (default 50304)
# WORKERS          tokenizer processes (default: one per core)
# STOP_AFTER       stop after this step: text, tokenizer or shards
#
# Arguments, GPUS_PER_NODE and PYTHON are passed to examples/pretrain_llama_1b.sh.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
out=${OUT:-runs/fineweb_edu}

pretrain() { exec bash examples/pretrain_llama_1b.sh "$@"; }
done_with() { [ "${STOP_AFTER:-}" != "$1" ] || exit 0; }
section() { printf '\n== %s\n' "$*"; }

if [[ " $* " == *" --dry-run "* ]]; then
  pretrain "$@"
fi

section "text"
text=${TEXT:-$out/text}
if [ -z "${TEXT:-}" ]; then
  "$PYTHON" examples/fineweb_edu/download.py --output "$text" --config "${CONFIG:-sample-10BT}" \
    ${GIGABYTES:+--gigabytes "$GIGABYTES"}
fi
du -shL "$text"
done_with text

section "tokenizer"
export TOKENIZER_TYPE=HuggingFaceTokenizer TOKENIZER_MODEL=${TOKENIZER_MODEL:-}
if [ -z "$TOKENIZER_MODEL" ]; then
  TOKENIZER_MODEL=$out/tokenizer
  "$PYTHON" tools/train_tokenizer.py --input "$text" --model-type byte-bpe --vocab-size "${VOCAB_SIZE:-50304}" \
    --max-text-bytes 2000000000 --model-prefix "$TOKENIZER_MODEL"
fi
done_with tokenizer

section "token shards"
"$PYTHON" tools/preprocess_data.py --input "$text" --output-prefix "$out/fineweb_edu" --append-eod \
  ${WORKERS:+--workers "$WORKERS"} --tokenizer-type "$TOKENIZER_TYPE" --tokenizer-model "$TOKENIZER_MODEL"
"$PYTHON" tools/inspect_shards.py "$out/fineweb_edu_text_document" --documents 1
done_with shards

section "training"
export DATA_PATH=$out/fineweb_edu_text_document SAVE=$out/llama-1b
pretrain "$@"
