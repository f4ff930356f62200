#!/usr/bin/env bash
# Everything that this repository measures and checks on one NVIDIA GPU, into one folder:
#   scripts/bench/gpu.sh [FOLDER] [--model SIZE] [--reference DIR]
# FOLDER       results; default out/gpu
# --model      size of the bench: full (default), middle or toy
# --reference  recorded numbers of the PyTorch release (docs/compare-with-pytorch.md)
# Needs a virtual environment in .venv with the extras gpu, bench and dev (docs/gpu.md). Each part
# writes a log and its exit status to status.txt; a part that fails does not stop the others.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=out/gpu model=full reference=
while [ $# -gt 0 ]; do
  case $1 in
    --model) model=$2; shift 2 ;;
    --reference) reference=$2; shift 2 ;;
    -*) echo "gpu.sh: unknown option $1" >&2; exit 2 ;;
    *) out=$1; shift ;;
  esac
done
BIN=${BIN:-.venv/bin}
mkdir -p "$out"
: >"$out/status.txt"
failed=0
part() { # name, command...
  local name=$1; shift
  echo "gpu.sh: $name" >&2
  "$@" >"$out/$name.txt" 2>"$out/$name.log"
  local status=$?
  echo "$name $status" >>"$out/status.txt"
  [ $status = 0 ] || { failed=1; echo "gpu.sh: $name failed: $out/$name.log" >&2; }
}

# The bench shares the card with PyTorch; XLA would take three quarters of it at the start.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
command -v nvidia-smi >/dev/null && part card nvidia-smi
part doctor "$BIN/animegamer" doctor --memory 24 80
part packages "$BIN/python" -m pip freeze
# float32 products in full: on a GPU they are shortened to 10 bits otherwise.
if [ -n "$reference" ]; then
  part parity env JAX_DEFAULT_MATMUL_PRECISION=highest "$BIN/animegamer" parity "$reference"
fi
# cuDNN's kernel on this card against the plain form; then the fast tests, which are for a CPU.
part kernel env JAX_PLATFORMS=${JAX_PLATFORMS-cuda,cpu} "$BIN/python" -m pytest -q -p no:cacheprovider \
  tests/models/kernels/test_cudnn.py -k on_this_gpu
part tests env JAX_PLATFORMS=cpu "$BIN/python" -m pytest -q -p no:cacheprovider \
  -m 'not slow and not hosts and not scale' ${TESTS:-tests}
# Both answer the same at a middle size; at the full one the weights are random on both sides.
middle=$([ "$model" = toy ] && echo toy || echo middle)
part agreement "$BIN/animegamer" bench --model "$middle" --dtype bfloat16 --programs mllm step vae \
  --against torch --torch eager --repeats 3 --json "$out/agreement.json"
part bench "$BIN/animegamer" bench --model "$model" --dtype bfloat16 --against torch \
  --repeats "${REPEATS:-10}" --json "$out/bench.json"
cat "$out/status.txt"
exit $failed
