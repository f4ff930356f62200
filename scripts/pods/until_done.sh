# What a pod of scripts/pods/gke.yaml runs: "$@", and for a training run a look at its result.
#
# `animegamer train` saves and ends with status 0 at a SIGTERM, which is what a drained node sends.
# Kubernetes would count such a pod as finished; without OUT/model it has failed, and starts again.
if [ "${2:-}" = train ]; then
  out='' before=''
  for word in "$@"; do
    case $word in --out=*) out=${word#--out=} ;; esac
    [ "$before" = --out ] && out=$word
    before=$word
  done
fi

# The first process of a container gets the signal and must hand it on.
child='' stopped=''
trap 'stopped=yes; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null' TERM
"$@" &
child=$!
[ -z "$stopped" ] || kill -TERM "$child" 2>/dev/null
while kill -0 "$child" 2>/dev/null; do # by naps: bash can miss a signal as a long wait begins
  sleep 0.3 &
  wait $!
done
wait "$child"
status=$?
[ "$status" -ne 0 ] && exit "$status"
[ -n "${out:-}" ] || exit 0

# The first host writes the result, a while after the others have ended.
patience=${PATIENCE:-600}
[ -n "$stopped" ] && patience=0
python3 - "$out" "$patience" <<'END'
import sys, time
from etils import epath
result = epath.Path(sys.argv[1]) / "model" / "config.json"
end = time.monotonic() + float(sys.argv[2])
while not result.exists():
    if time.monotonic() >= end:
        sys.exit(f"{result} is not there: the run was stopped before its end, and goes on when started again")
    time.sleep(min(5.0, float(sys.argv[2])))
END
