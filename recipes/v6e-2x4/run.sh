#!/usr/bin/env bash
# Times a model and plays a game on a v6e:2x4 slice; see README.md. Needs NAME and ZONE of the slice,
# and MODEL, a bundle.
set -euo pipefail
cd "$(dirname "$0")/../.."
: "${MODEL:?set MODEL to a bundle, such as gs://BUCKET/adapt/model}"
source recipes/on_all_hosts.sh

on animegamer bench --model "$MODEL" --dtype bfloat16 --programs mllm step vae --repeats 5
on animegamer play --model "$MODEL" --layout latency --resume --out game \
  --instructions animegamer_jax/animegamer_jax/assets/instructions/qiqi.txt
echo "the game is in ~/game on the slice"
