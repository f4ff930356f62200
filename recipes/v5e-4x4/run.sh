#!/usr/bin/env bash
# Adapts a trained model to other films on a v5e:4x4 slice; see README.md. Needs NAME and ZONE of the
# slice, BUCKET with games/, and MODEL, a bundle whose decoder is trained.
set -euo pipefail
cd "$(dirname "$0")/../.."
: "${BUCKET:?set BUCKET to the name of your bucket}" "${MODEL:?set MODEL to a bundle}"
source recipes/on_all_hosts.sh

on animegamer data features --size full --model "$MODEL" --data "gs://$BUCKET/games" \
  --out "gs://$BUCKET/features" --batch 16
expect "gs://$BUCKET/features/set.json"
on animegamer train mllm --size full --model "$MODEL" --data "gs://$BUCKET/features" \
  --out "gs://$BUCKET/mllm" --steps 500 --batch-size 64 --fsdp 16
expect "gs://$BUCKET/mllm/model/config.json"
on animegamer train adapt --size full --model "gs://$BUCKET/mllm/model" \
  --data "gs://$BUCKET/features" --out "gs://$BUCKET/adapt" --steps 1250 --batch-size 16
expect "gs://$BUCKET/adapt/model/config.json"
echo "gs://$BUCKET/adapt/model"
