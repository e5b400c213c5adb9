#!/usr/bin/env bash
# FineWeb-Edu (educational web pages), from the Hugging Face Hub to a trained model on one machine: download the text,
# train a tokenizer, create token shards, and pretrain a Llama-style GPT with 1.4 billion parameters, or the model of
# CONFIG, in FP8.
#
#   pip install -e '.[datasets]'
#   GIGABYTES=5 bash examples/fineweb_edu/run.sh
#   CONFIG=configs/gpt2_124m_fineweb_edu_h200.yaml bash examples/fineweb_edu/run.sh
#   sbatch --export=ALL,CONFIG=configs/gpt2_124m_fineweb_edu_h200.yaml --gpus-per-node=1 examples/fineweb_edu/slurm.sh
#
# Other text: DATASET=Skylion007/openwebtext SUBSET=plain_text, or a file such as tinyshakespeare's input.txt:
#
#   TEXT=input.txt TEXT_SEPARATOR='\n\n' VOCAB_SIZE=2000 bash examples/fineweb_edu/run.sh
#
# If it is interrupted, run it again to resume. If the training machine has no network, run the first three steps on
# another machine (STOP_AFTER=shards) and copy OUT. To print the plan of the training on any machine:
#
#   bash examples/fineweb_edu/run.sh --dry-run --world-size 8 --target h200
#
# OUT              folder for everything (default runs/fineweb_edu)
# CONFIG           file with the model and the training; its shards, tokenizer and folders are those of this script
# DATASET          on the Hub (default HuggingFaceFW/fineweb-edu), with a column "text"
# SUBSET           part of it: sample-10BT (default), sample-100BT, sample-350BT, or default (all)
# TEXT             existing folder of Parquet files with a column "text", or a text file; nothing is downloaded
# TEXT_SEPARATOR   what separates the documents of a text file
# GIGABYTES        how much text to download (default: all of SUBSET; 10 billion tokens are about 45 GB)
# TOKENIZER_MODEL  folder with a tokenizer.json and tokenizer_config.json (default: one is trained on the text)
# VOCAB_SIZE       vocabulary size of the trained tokenizer (default 50304)
# WORKERS          tokenizer processes (default: one per core)
# STOP_AFTER       stop after this step: text, tokenizer or shards
#
# Arguments are further flags of the training. GPUS_PER_NODE: ranks to start (default: one per GPU).
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
out=${OUT:-runs/fineweb_edu}

if [ ! -f "${CONFIG:-README.md}" ]; then
  echo "CONFIG=$CONFIG: no such file. It has the settings of the training; SUBSET is a part of the dataset."
  exit 64
fi

pretrain() {
  [ -n "${CONFIG:-}" ] || exec bash examples/pretrain_llama_1b.sh "$@"
  if [[ " $* " == *" --dry-run "* ]]; then
    exec "$PYTHON" pretrain_gpt.py "$CONFIG" "$@"
  fi
  local ranks=${GPUS_PER_NODE:-$("$PYTHON" -c 'import torch; print(max(1, torch.cuda.device_count()))')}
  [ "$ranks" = 1 ] || export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
  # After a SIGTERM, torchrun waits this long for its ranks to save, instead of 30 s.
  export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}"
  exec "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$ranks" pretrain_gpt.py "$CONFIG" \
    --data-path "$DATA_PATH" --tokenizer-type "$TOKENIZER_TYPE" --tokenizer-model "$TOKENIZER_MODEL" \
    --save "$SAVE" --load "$SAVE" "$@"
}
done_with() { [ "${STOP_AFTER:-}" != "$1" ] || exit 0; }
section() { printf '\n== %s\n' "$*"; }

if [[ " $* " == *" --dry-run "* ]]; then
  pretrain "$@"
fi

section "text"
text=${TEXT:-$out/text}
if [ -z "${TEXT:-}" ]; then
  "$PYTHON" examples/fineweb_edu/download.py --output "$text" --dataset "${DATASET:-HuggingFaceFW/fineweb-edu}" \
    --config "${SUBSET:-sample-10BT}" ${GIGABYTES:+--gigabytes "$GIGABYTES"}
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
  ${TEXT_SEPARATOR:+--text-separator "$TEXT_SEPARATOR"} ${WORKERS:+--workers "$WORKERS"} --tokenizer-type "$TOKENIZER_TYPE" --tokenizer-model "$TOKENIZER_MODEL"
"$PYTHON" tools/inspect_shards.py "$out/fineweb_edu_text_document" --documents 1
done_with shards

section "training"
name=$(basename "${CONFIG:-llama-1b}")
export DATA_PATH=$out/fineweb_edu_text_document SAVE=$out/${name%.*}
pretrain "$@"
