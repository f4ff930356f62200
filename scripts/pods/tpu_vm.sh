#!/usr/bin/env bash
# Installs this checkout on every worker of a Cloud TPU VM slice and runs a command on all of them.
#
#   scripts/pods/tpu_vm.sh NAME ZONE animegamer train decoder --data gs://... --out gs://... ...
#   scripts/pods/tpu_vm.sh NAME ZONE --follow     shows the log of the first worker, which reports for all
#   scripts/pods/tpu_vm.sh NAME ZONE --status     shows whether each worker runs, and its last line
#   scripts/pods/tpu_vm.sh NAME ZONE --stop       sends SIGTERM, at which training saves
#
# NAME and ZONE are those of `gcloud compute tpus tpu-vm create`. The workers find each other through
# the TPU's metadata. The command runs in the home folder and outlives the connection; each worker
# logs to ~/animegamer.log. Uncommitted changes are not sent.
set -euo pipefail
[ $# -ge 3 ] || { sed -n '2,11p' "$0" >&2; exit 2; }
NAME=$1 ZONE=$2
shift 2
cd "$(dirname "$0")/../.."
TPU=(gcloud compute tpus tpu-vm)
on() { "${TPU[@]}" ssh "$NAME" --zone "$ZONE" --worker="$1" --command "$2"; }
RUNS='[ -f animegamer.pid ] && kill -0 "$(cat animegamer.pid)" 2>/dev/null'
case $1 in
  --follow) on 0 'tail -n 100 -F animegamer.log'; exit ;;
  --status) on all "if $RUNS; then echo runs; else echo ended; fi; tail -n 1 animegamer.log"; exit ;;
  --stop)
    on all "if $RUNS; then kill -TERM \"\$(cat animegamer.pid)\"; fi
      for second in \$(seq 300); do if $RUNS; then sleep 1; else exit 0; fi; done
      echo 'still running after 300 s' >&2; exit 1"
    exit ;;
  -*) echo "$1: expected a command, --follow, --status or --stop" >&2; exit 2 ;;
esac
if [ -n "$(git status --porcelain)" ]; then
  echo "tpu_vm.sh: uncommitted changes: the workers get $(git log -1 --format=%h) without them" >&2
fi
on all "if $RUNS; then echo 'a command runs there already: --stop ends it' >&2; exit 1; fi"
FOLDER=$(mktemp -d)
trap 'rm -r "$FOLDER"' EXIT
git archive --format=tar.gz --prefix=animegamer_jax/ -o "$FOLDER/animegamer.tar.gz" HEAD
"${TPU[@]}" scp "$FOLDER/animegamer.tar.gz" "$NAME:animegamer.tar.gz" --zone "$ZONE" --worker=all
# The system's Python may be older than 3.11: uv installs one.
on all "set -e
  export PATH=\$HOME/.local/bin:\$PATH
  rm -rf animegamer_jax && tar xzf animegamer.tar.gz
  command -v uv > /dev/null || curl -LsSf https://astral.sh/uv/install.sh | sh
  [ -x venv/bin/python ] || uv venv --quiet --python 3.11 venv
  uv pip install --quiet --python venv/bin/python -e './animegamer_jax[train,tpu,evaluate]' -c animegamer_jax/constraints.txt"
COMMAND=$(printf '%q ' "$@")
on all "export PATH=\$HOME/venv/bin:\$PATH
  nohup setsid $COMMAND > animegamer.log 2>&1 < /dev/null &
  echo \$! > animegamer.pid"
echo "started; scripts/pods/tpu_vm.sh $NAME $ZONE --follow shows the log"
