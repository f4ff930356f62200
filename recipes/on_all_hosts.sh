# Sourced by the recipes: `on COMMAND...` runs a command on all hosts of a slice and waits for its end.
# NAME and ZONE name the slice. If ON is set, it is put before the command instead, such as ON=echo.
on() {
  if [ -n "${ON:-}" ]; then
    $ON "$@"
    return
  fi
  : "${NAME:?set NAME to the name of the slice}" "${ZONE:?set ZONE to its zone}"
  scripts/pods/tpu_vm.sh "$NAME" "$ZONE" "$@"
  local status=runs
  while [[ $status == *runs* ]]; do
    sleep "${EVERY:-60}"
    status=$(scripts/pods/tpu_vm.sh "$NAME" "$ZONE" --status)
  done
  echo "$status"  # the last line of each host; a stage without its input stops at once
}
