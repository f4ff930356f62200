#!/usr/bin/env bash
# Lays the toy's weights after each stage out as scripts/train_toy.sh leaves them: that makes games and
# features anew, and then scripts/toy_ablations.py has all that it needs.
#
#   checkpoints/restore.sh [FOLDER] && scripts/train_toy.sh [FOLDER]      (default out/toy)
#
# The weights are in bfloat16. Networks that a stage leaves as they are lie with the warm-up's alone (of
# the language model's stage with the decoder's); the last stage's are the embedded model.
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
for part in clip t5 vae tokenizer encoder dit; do
  cp -r "$OUT/decoder/model/$part" "$OUT/mllm/model/$part"
done
cp -r animegamer_jax/assets/toy "$OUT/adapt/model"
for stage in clip t5 vae; do # what they left is in the next ones as well
  ln -s ../dit/model "$OUT/$stage/model"
done
