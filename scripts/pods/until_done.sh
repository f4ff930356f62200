# Runs "$@" in a pod of scripts/pods/gke.yaml, and fails if a training run has no result at its end.
#
# `animegamer train` saves and ends with status 0 at a SIGTERM, which a drained node sends.
# Kubernetes would count such a pod as finished; here it fails without OUT/model, and starts again.
if [ "${2:-}" = train ]; then
  out='' before=''
  for word in "$@"; do
    case $word in --out=*) out=${word#--out=} ;; esac
    [ "$before" = --out ] && out=$word
    before=$word
  done
fi

# The first process of a container gets the signal and must pass it on.
child='' stopped=''
trap 'stopped=yes; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null' TERM
"$@" &
child=$!
[ -z "$stopped" ] || kill -TERM "$child" 2>/dev/null
while kill -0 "$child" 2>/dev/null; do # short waits: bash can miss a signal as a long one begins
  sleep 0.3 &
  wait $!
done
wait "$child"
status=$?
[ "$status" -ne 0 ] && exit "$status"
[ -n "${out:-}" ] || exit 0

# The first host writes the result, some time after the others have ended.
patience=${PATIENCE:-600}
[ -n "$stopped" ] && patience=0
python3 - "$out" "$patience" <<'END'
import sys, time
from etils import epath
result = epath.Path(sys.argv[1]) / "model" / "config.json"
end = time.monotonic() + float(sys.argv[2])
while not result.exists():
    if time.monotonic() >= end:
        sys.exit(f"{result} does not exist: the run was stopped before its end; start it again to resume")
    time.sleep(min(5.0, float(sys.argv[2])))
END
