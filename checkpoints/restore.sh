#!/usr/bin/env bash
# Lays the toy's weights after its decoder stage out as scripts/train_toy.sh leaves them, so that it
# goes on from there (games and features are made anew, the language model and the adaptation trained).
#
#   checkpoints/restore.sh [FOLDER] && scripts/train_toy.sh [FOLDER]      (default out/toy)
#
# The weights are in bfloat16. Networks that a stage leaves as they are lie with the warm-up's alone.
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${1:-out/toy}
[ ! -e "$OUT/decoder" ] || { echo "restore: $OUT/decoder: already there" >&2; exit 2; }
mkdir -p "$OUT"
cp -r checkpoints/toy/. "$OUT"
for stage in dit decoder; do
  for part in clip t5 vae tokenizer; do
    [ -e "$OUT/$stage/model/$part" ] || cp -r "$OUT/warmup/model/$part" "$OUT/$stage/model/$part"
  done
done
for stage in clip t5 vae; do # what they left is in the next ones as well
  ln -s ../dit/model "$OUT/$stage/model"
done
