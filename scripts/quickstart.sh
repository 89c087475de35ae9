#!/usr/bin/env bash
# The quickstart: builds Troupe, prepares real English text from an installed Debian package, trains a
# small Mixture-of-Experts model on it on this machine's CPU, and shows what it has learned.
#
# Everything lies in runs/quickstart afterwards. Running it again goes on where it was interrupted;
# a finished run is shown, not repeated (remove runs/quickstart to train anew).
set -euo pipefail
cd "$(dirname "$0")/.."

run=runs/quickstart
steps=360
troupe=build/troupe

bash scripts/build.sh release troupe

mkdir -p "$run"
if [[ ! -f $run/data.idx ]]; then
  text=$(bash scripts/quickstart_text.sh "$run/text")
  "$troupe" tokenize --input "$text" --output-prefix "$run/data" --split-documents 1
fi

"$troupe" train --model quickstart --data-path "$run/data" --split 95,5,0 \
  --seq-length 256 --micro-batch-size 8 --train-iters "$steps" \
  --lr 3e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 30 \
  --weight-decay 0.1 --adam-beta2 0.95 \
  --eval-interval 100 --eval-iters 16 --log-interval 10 --save-interval 100 --keep-checkpoints 2 \
  --save "$run" --load "$run"

losses=$(sed -n 's/.*"val_loss":\([^,}]*\).*/\1/p' "$run/metrics.jsonl")
echo
echo "A sample of 300 bytes, continuing \"In the beginning\":"
echo "----------------------------------------------------------------"
"$troupe" generate --load "$run" --prompt "In the beginning" --max-new-tokens 300 --temperature 0.7
echo "----------------------------------------------------------------"
LC_ALL=C printf 'Validation loss: %.4f nats per byte before training, %.4f after.\n' \
  "$(head -n 1 <<<"$losses")" "$(tail -n 1 <<<"$losses")"
echo "Files: $run/metrics.jsonl (one line per logged step), $run/checkpoints/ (the model),"
echo "       $run/text/ and $run/data.{bin,idx} (what it was trained on)."
