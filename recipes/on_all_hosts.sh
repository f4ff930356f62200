# Sourced by the recipes: `on COMMAND...` runs a command on all hosts of a slice and waits for its end;
# `expect FILE` ends the recipe if the command has not written this file in a bucket.
# NAME and ZONE name the slice. If ON is set, it is put before the command instead, such as ON=echo.
on() {
  if [ -n "${ON:-}" ]; then
    $ON "$@"
    return
  fi
  : "${NAME:?set NAME to the name of the slice}" "${ZONE:?set ZONE to its zone}"
  local status=''
  status=$(scripts/pods/tpu_vm.sh "$NAME" "$ZONE" --status 2> /dev/null) || true # no log on a new slice
  if runs; then
    echo "a command runs on $NAME already: waiting for its end before: $*"
    wait_for_hosts
  fi
  scripts/pods/tpu_vm.sh "$NAME" "$ZONE" "$@"
  wait_for_hosts
  echo "$status"  # the last line of each host
}

runs() { # a line `runs` of any host; the other lines are `ended` and the last of each log
  grep -q '\bruns$' <<< "$status"
}

wait_for_hosts() {
  status=runs
  while runs; do
    sleep "${EVERY:-60}"
    status=$(scripts/pods/tpu_vm.sh "$NAME" "$ZONE" --status)
  done
}

expect() {
  if [ -z "${ON:-}" ] && ! gcloud storage ls "$1" > /dev/null; then
    echo "$1 does not exist: the command above failed or was stopped; its log is ~/animegamer.log on" \
      "each host. To continue, run this script again" >&2
    return 1
  fi
}
