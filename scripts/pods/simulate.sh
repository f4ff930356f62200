#!/usr/bin/env bash
# Runs a command on a simulated slice: a number of devices on this machine's processor.
#
#   scripts/pods/simulate.sh 8 animegamer train decoder --fsdp 4 ...
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,4p' "$0" >&2; exit 2; }
DEVICES=$1
shift
export JAX_PLATFORMS=cpu
export XLA_FLAGS="--xla_force_host_platform_device_count=$DEVICES ${XLA_FLAGS:-}"
exec "$@"
