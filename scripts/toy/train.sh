#!/usr/bin/env bash
# Trains the embedded toy model from scratch: games, foundations, features, warm-up, decoder (first on
# pictures), what the decoder shows, MLLM (first on captions), adaptation, a decoder of pictures. Stop
# it at any time: the same command continues where it stopped.
#
#   make train-toy                       (makes .venv with the extra `train`, then runs this)
#   scripts/toy/train.sh [FOLDER]        (default out/toy; at most 12 hours on two cores)
#
# The finished model is FOLDER/picture/model. `animegamer evaluate --model FOLDER/picture/model` scores
# it, `scripts/toy/embed.py` puts it into the package. SIGTERM and Ctrl-C are passed to the stage
# that runs, which saves first; the script then exits with status 143 or 130.
set -euo pipefail
set -m # a stage is its own process group, so that a terminal's Ctrl-C reaches it once, from here
cd "$(dirname "$0")/../.."
OUT=${1:-out/toy}
BIN=${BIN:-.venv/bin}
[ -x "$BIN/animegamer" ] || { echo "train.sh: no $BIN/animegamer: run make train-toy" >&2; exit 2; }
# One device per core: half a batch on each is faster than the whole batch on both.
DEVICES=--xla_force_host_platform_device_count=${CORES:-2}

have() { [ -e "$1" ] && echo "$(date +%T) exists: $1"; }
say() { echo "$(date +%T) $*"; }

CHILD= STOPPED=
forward() { # signal, exit status
  STOPPED=$2
  if [ -n "$CHILD" ]; then kill -"$1" "$CHILD" 2>/dev/null || true; fi
}
trap 'forward TERM 143' TERM
trap 'forward INT 130' INT
trap 'forward TERM 129' HUP

run() { # the file it makes, command: waits for its end, after a signal for the end of its save
  local made=$1 status=0
  shift
  if [ -z "$STOPPED" ]; then
    "$@" &
    CHILD=$!
    [ -z "$STOPPED" ] || kill -TERM "$CHILD" 2>/dev/null || true # the signal came between the two lines
    while kill -0 "$CHILD" 2>/dev/null; do # short sleeps: bash can miss a signal as a long wait begins
      sleep 0.3 &
      wait $! || true
    done
    wait "$CHILD" || status=$?
    CHILD=
  fi
  if [ -z "$STOPPED" ] && [ "$status" != 0 ]; then exit "$status"; fi # the command printed why
  if [ -n "$STOPPED" ] || [ ! -e "$made" ]; then
    say "stopped before $made: the same command continues" >&2
    exit "${STOPPED:-1}"
  fi
}

train() { # name, bundle to start from ("" for none), dataset, options of `animegamer train`
  local name=$1 model=$2 data=$3
  shift 3
  have "$OUT/$name/model/config.json" && return
  say "$name"
  run "$OUT/$name/model/config.json" env XLA_FLAGS="$DEVICES ${XLA_FLAGS:-}" "$BIN/animegamer" \
    train "$@" --data "$data" ${model:+--model "$model"} --out "$OUT/$name"
}

mkdir -p "$OUT"
have "$OUT/games/set.json" || {
  say games
  run "$OUT/games/set.json" "$BIN/animegamer" data toyworld --out "$OUT/games"
}
train clip "" "$OUT/games" foundations --part clip
train t5 "$OUT/clip/model" "$OUT/games" foundations --part t5
train vae "$OUT/t5/model" "$OUT/games" foundations --part vae
have "$OUT/features/set.json" || {
  say features
  run "$OUT/features/set.json" "$BIN/animegamer" data features --model "$OUT/vae/model" \
    --data "$OUT/games" --out "$OUT/features"
}
train dit "$OUT/vae/model" "$OUT/features" foundations --part dit
train warmup "$OUT/dit/model" "$OUT/features" warmup
train pictures "$OUT/warmup/model" "$OUT/features" decoder --pictures 4 --steps 4000
train decoder "$OUT/pictures/model" "$OUT/features" decoder --timestep-shift 2
have "$OUT/features/shown/set.json" || {
  say shown
  run "$OUT/features/shown/set.json" "$BIN/animegamer" data shown --model "$OUT/decoder/model" \
    --data "$OUT/features"
}
train captions "$OUT/decoder/model" "$OUT/features" mllm --targets captions --steps 1000 --batch-size 64 \
  --naming-weight 0.01
train mllm "$OUT/captions/model" "$OUT/features" mllm --history-shown 0.7 --batch-size 8 \
  --caption-weight 1 --naming-weight 0.01
train adapt "$OUT/mllm/model" "$OUT/features" adapt --history-shown 0.7 --timestep-shift 2
train picture "$OUT/adapt/model" "$OUT/features" picture --history-shown 0.7
say "done: $OUT/picture/model"
