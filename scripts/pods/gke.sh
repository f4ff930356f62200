#!/usr/bin/env bash
# Runs a command on one or more TPU slices of a GKE cluster (JobSet), in an image with this package
# (scripts/pods/Dockerfile).
#
#   scripts/pods/gke.sh NAME IMAGE v5p:4x4x4 animegamer train decoder --data gs://... --out gs://...
#   scripts/pods/gke.sh NAME IMAGE 2xv5p:4x4x4 animegamer train ...    # on two slices
#
# DRY=1 prints the manifest and applies nothing. The same with xpk:
#   xpk workload create --workload NAME --docker-image IMAGE --tpu-type v5p-128 --command "animegamer train ..."
set -euo pipefail
[ $# -ge 4 ] || { sed -n '2,9p' "$0" >&2; exit 2; }
export NAME=$1 IMAGE=$2 SLICE=$3
shift 3
if ! [[ $NAME =~ ^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$ ]]; then
  echo "$NAME: expected a name of at most 40 characters: a-z, digits, and hyphens inside" >&2; exit 2
fi
export SLICES=1
if [[ $SLICE =~ ^([1-9][0-9]?)x([vt].*)$ ]]; then SLICES=${BASH_REMATCH[1]} SLICE=${BASH_REMATCH[2]}; fi
if ! [[ $SLICE =~ ^(v5e|v6e):[1-9][0-9]*x[1-9][0-9]*$ || $SLICE =~ ^(v4|v5p|tpu7x):[1-9][0-9]*x[1-9][0-9]*x[1-9][0-9]*$ ]]; then
  echo "$SLICE: expected v5e:AxB, v6e:AxB, v4:AxBxC, v5p:AxBxC or tpu7x:AxBxC, such as v5p:4x4x4, or 2xv5p:4x4x4 for two" >&2; exit 2
fi
export TOPOLOGY=${SLICE#*:}
CHIPS=$((${TOPOLOGY//x/*}))
case ${SLICE%%:*} in
  v4) ACCELERATOR=tpu-v4-podslice CHIPS_A_HOST=4 ;;
  v5e) ACCELERATOR=tpu-v5-lite-podslice CHIPS_A_HOST=$((CHIPS <= 8 ? CHIPS : 4)) ;;
  v5p) ACCELERATOR=tpu-v5p-slice CHIPS_A_HOST=4 ;;
  tpu7x) ACCELERATOR=tpu7x CHIPS_A_HOST=4 ;;
  v6e) ACCELERATOR=tpu-v6e-slice CHIPS_A_HOST=$((CHIPS <= 8 ? CHIPS : 4)) ;;
esac
if ((CHIPS % CHIPS_A_HOST)); then
  echo "$SLICE: $CHIPS chips: expected a multiple of $CHIPS_A_HOST, the chips of a host" >&2; exit 2
fi
HOSTS=$((CHIPS / CHIPS_A_HOST))
HERE=$(dirname "$0")
COMMAND=$(python3 -c 'import json, sys; print(json.dumps(["bash", "-c", open(sys.argv[1]).read(), *sys.argv[1:]]))' \
  "$HERE/until_done.sh" "$@")
export ACCELERATOR CHIPS_A_HOST HOSTS COMMAND
MANIFEST=$(python3 -c 'import os, string, sys
print(string.Template(sys.stdin.read()).substitute(os.environ))' < "$HERE/gke.yaml")
if [ -n "${DRY:-}" ]; then echo "$MANIFEST"; else echo "$MANIFEST" | kubectl apply -f -; fi
