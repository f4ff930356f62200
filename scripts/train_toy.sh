#!/usr/bin/env bash
# Trains the embedded toy model from nothing: games, foundations, features, warm-up, decoder, MLLM,
# adaptation. Stop it at any time: the same command goes on where it stopped.
#
#   scripts/train_toy.sh [FOLDER]        (default out/toy; at most 3 hours on two cores)
#
# The finished model is FOLDER/adapt/model. `scripts/score_toy.py` scores it, `scripts/embed_toy.py`
# puts it into the package.
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${1:-out/toy}
BIN=${BIN:-.venv/bin}
# A core is a device: half a batch on each is faster than the whole on both.
DEVICES=--xla_force_host_platform_device_count=${CORES:-2}
# Products of bfloat16 are the faster ones only where the processor has tiles for them.
DTYPE=float32
if grep -qs amx_bf16 /proc/cpuinfo; then DTYPE=bfloat16; fi

have() { [ -e "$1" ] && echo "$(date +%T) there: $1"; }
say() { echo "$(date +%T) $*"; }

train() { # name, bundle to start from ("" for none), data set, options of `animegamer train`
  local name=$1 model=$2 data=$3
  shift 3
  have "$OUT/$name/model/config.json" && return
  say "$name"
  XLA_FLAGS="$DEVICES ${XLA_FLAGS:-}" "$BIN/animegamer" train "$@" --data "$data" ${model:+--model "$model"} --out "$OUT/$name"
}

mkdir -p "$OUT"
have "$OUT/games/set.json" || { say games; "$BIN/animegamer" data toyworld --out "$OUT/games"; }
train clip "" "$OUT/games" foundations --part clip
train t5 "$OUT/clip/model" "$OUT/games" foundations --part t5
train vae "$OUT/t5/model" "$OUT/games" foundations --part vae
have "$OUT/features/set.json" || {
  say features
  "$BIN/animegamer" data features --model "$OUT/vae/model" --data "$OUT/games" --out "$OUT/features"
}
train dit "$OUT/vae/model" "$OUT/features" foundations --part dit --dtype "$DTYPE"
train warmup "$OUT/dit/model" "$OUT/features" warmup --dtype "$DTYPE"
train decoder "$OUT/warmup/model" "$OUT/features" decoder --dtype "$DTYPE"
train mllm "$OUT/decoder/model" "$OUT/features" mllm --dtype "$DTYPE"
train adapt "$OUT/mllm/model" "$OUT/features" adapt --dtype "$DTYPE"
say "done: $OUT/adapt/model"
