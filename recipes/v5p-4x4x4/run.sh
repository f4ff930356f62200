#!/usr/bin/env bash
# Trains all stages on a v5p:4x4x4 slice; see README.md. Needs NAME and ZONE of the slice, and BUCKET
# with games/ and start/. ON runs a command on all hosts and waits; by default by tpu_vm.sh.
set -euo pipefail
cd "$(dirname "$0")/../.."
: "${BUCKET:?set BUCKET to the name of your bucket}"
source recipes/on_all_hosts.sh

on animegamer data features --size full --model "gs://$BUCKET/start" --data "gs://$BUCKET/games" \
  --out "gs://$BUCKET/features" --batch 64
expect "gs://$BUCKET/features/set.json"
stage() { # stage, bundle to start from, options
  local name=$1 model=$2
  shift 2
  on animegamer train "$name" --size full --model "$model" --data "gs://$BUCKET/features" \
    --out "gs://$BUCKET/$name" --remat dots "$@"
  expect "gs://$BUCKET/$name/model/config.json"
}
stage warmup "gs://$BUCKET/start" --steps 2500 --batch-size 64
stage decoder "gs://$BUCKET/warmup/model" --steps 20000 --batch-size 64
stage mllm "gs://$BUCKET/decoder/model" --steps 7500 --batch-size 256
stage adapt "gs://$BUCKET/mllm/model" --steps 2500 --batch-size 64
echo "gs://$BUCKET/adapt/model"
