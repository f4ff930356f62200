#!/usr/bin/env bash
# Builds wheel and source distribution, checks what is in them, and plays a game from the wheel in an
# empty environment, outside of the checkout:
#   scripts/check_package.sh [FOLDER]      FOLDER keeps the two files; by default they are deleted
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
out=${1:-$work/dist}
mkdir -p "$out"
out=$(cd "$out" && pwd)
pip=(-m pip install --quiet --disable-pip-version-check)

"${PYTHON:-python3}" -m venv "$work/build"
"$work/build/bin/python" "${pip[@]}" hatchling
cd "$root"
"$work/build/bin/python" -m hatchling build -t sdist -d "$out" >/dev/null
# The wheel is built from the source distribution, as pip does it: both must be complete.
mkdir "$work/source"
tar -xzf "$out"/animegamer_jax-*.tar.gz -C "$work/source" --strip-components 1
(cd "$work/source" && "$work/build/bin/python" -m hatchling build -t wheel -d "$out" >/dev/null)
wheel=$(ls "$out"/animegamer_jax-*.whl)

"${PYTHON:-python3}" - "$root" "$wheel" "$out"/animegamer_jax-*.tar.gz <<'END'
import pathlib, subprocess, sys, tarfile, zipfile

root, wheel, source = map(pathlib.Path, sys.argv[1:])
listed = subprocess.run(
    ["git", "-C", root, "ls-files", "--cached", "--others", "--exclude-standard", "animegamer_jax"],
    capture_output=True, text=True, check=True,
).stdout.splitlines()
expected = {name for name in listed if (root / name).is_file()}
held = set(zipfile.ZipFile(wheel).namelist())
missing = expected - held
assert not missing, f"not in the wheel: {sorted(missing)[:5]}"
other = {name for name in held - expected if ".dist-info/" not in name}
assert not other, f"unexpected in the wheel: {sorted(other)[:5]}"
assert "animegamer_jax/py.typed" in held
assert any(name.endswith("licenses/LICENSE") for name in held), "the wheel has no licence"
in_source = {name.partition("/")[2] for name in tarfile.open(source).getnames()}
wanted = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "PKG-INFO"}
assert wanted <= in_source, f"not in the source distribution: {wanted - in_source}"
for file in (wheel, source):
    size = file.stat().st_size / 1e6
    assert size < 25, f"{file.name}: {size:.1f} MB: expected less than 25"
    print(f"{file.name}: {size:.1f} MB")
END

"${PYTHON:-python3}" -m venv "$work/venv"
constraints=$("$work/venv/bin/python" -c \
  'import sys; print("constraints-3.13.txt" if sys.version_info >= (3, 12) else "constraints.txt")')
"$work/venv/bin/python" "${pip[@]}" --constraint "$root/$constraints" "$wheel"
mkdir "$work/empty"
cd "$work/empty"
printf 'Character: Mika; Motion: gently waving; Background: day town.\n' >game.txt
env -u PYTHONPATH "$work/venv/bin/animegamer" play --steps 2 --instructions game.txt --out game
test -s game/turn_001.mp4
env -u PYTHONPATH "$work/venv/bin/animegamer" doctor --json >/dev/null
echo "the wheel plays outside of the checkout"
