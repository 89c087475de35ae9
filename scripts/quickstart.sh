#!/usr/bin/env bash
# The quickstart: builds Troupe, prepares real English text from an installed Debian package, trains a
# small Mixture-of-Experts model on it, and shows what it has learned. It trains on the GPU where there
# is one that Troupe is built for and a CUDA toolkit to do so, else on the CPU; DEVICE (cpu or cuda)
# in the environment decides otherwise.
#
# Everything lies in runs/quickstart afterwards. Running it again goes on where it was interrupted;
# a finished run is shown, not repeated (remove runs/quickstart to train anew).
set -euo pipefail
cd "$(dirname "$0")/.."

run=runs/quickstart
steps=360
troupe=build/troupe

# Compute capability 9.0, as cmake/TroupeCuda.cmake says, and nvcc 13 or newer.
find_device() {
  local nvcc
  nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
  if nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -x 9.0 >/dev/null &&
    "$nvcc" --version 2>/dev/null | grep -E 'release (1[3-9]|[2-9][0-9])\.' >/dev/null; then
    echo cuda
  else
    echo cpu
  fi
}

device=${DEVICE:-$(find_device)}
if [[ $device == cuda ]]; then
  echo "Building for the GPU; DEVICE=cpu trains on the CPU."
  bash scripts/install_dependencies.sh cuda
  bash scripts/build.sh cuda troupe
else
  bash scripts/build.sh release troupe
fi

mkdir -p "$run"
if [[ ! -f $run/data.idx ]]; then
  text=$(bash scripts/quickstart_text.sh "$run/text")
  "$troupe" tokenize --input "$text" --output-prefix "$run/data" --split-documents 1
fi

"$troupe" train --device "$device" --model quickstart --data-path "$run/data" --split 95,5,0 \
  --seq-length 256 --micro-batch-size 8 --train-iters "$steps" \
  --lr 3e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 30 \
  --weight-decay 0.1 --adam-beta2 0.95 \
  --eval-interval 100 --eval-iters 16 --log-interval 10 --save-interval 100 --keep-checkpoints 2 \
  --save "$run" --load "$run"

losses=$(sed -n 's/.*"val_loss":\([^,}]*\).*/\1/p' "$run/metrics.jsonl")
echo
echo "A sample of 300 bytes, continuing \"In the beginning\":"
echo "----------------------------------------------------------------"
"$troupe" generate --load "$run" --prompt "In the beginning" --max-new-tokens 300 \
  --temperature 0.7 | fold -s -w 79
echo "----------------------------------------------------------------"
LC_ALL=C printf 'Validation loss: %.4f nats per byte before training, %.4f after.\n' \
  "$(head -n 1 <<<"$losses")" "$(tail -n 1 <<<"$losses")"
cat <<EOF
Files in $run: metrics.jsonl, checkpoints/ (the model), text/ and
data.{bin,idx} (what it was trained on).

Next:
  $troupe generate --load $run --prompt "And God said"
  $troupe inspect --model quickstart --seq-length 64 --layer 0
  $troupe plan --model qwen3-30b-a3b --bf16 --seq-length 4096 \\
      --ranks 64 --expert-model-parallel-size 8 --fake-process-group
To train on your own text: docs/getting_started.md.
EOF
