"""Reads how `scripts/toy/train.sh` trained each stage, and what has changed since.

A stage's checkpoints hold its recipe, the networks, the protocol and the model it started from.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.errors import UserError
from animegamer_jax.storage.serialization import flattened, shown, to_json
from animegamer_jax.train.registry import PARTS, find_stage
from animegamer_jax.train.stages.base import Stage
from animegamer_jax.train.stages.recipe import Recipe

_FIRST = {"pictures": "decoder", "captions": "mllm"}
"""Commands whose stage comes twice, the first time with an easier task."""
_REST = ("warmup", "pictures", "decoder", "captions", "mllm", "adapt", "picture")
STAGES = (*PARTS, *_REST)  # in the order of the training
_MEASURED = {"vae": ("vae.scaling_factor", "vae.frequency_scales")}  # at a stage's end
_ABSENT = object()


def xla_flags() -> str:
    """Returns the flags of `scripts/toy/train.sh`: one device per core."""
    devices = f"--xla_force_host_platform_device_count={os.environ.get('CORES', '2')}"
    return f"{devices} {os.environ.get('XLA_FLAGS', '')}"


def read_run_config(folder: Path, stage: str) -> dict[str, Any]:
    """Returns what the stage's last checkpoint says about itself.

    Raises:
        UserError: It has none.
    """
    found = (folder / stage / "checkpoints").glob("*/run_config/metadata")
    last = max(found, key=lambda path: int(path.parent.parent.name), default=None)
    if last is None:
        raise UserError(f"{folder / stage}: expected the stage's checkpoints, found none")
    return json.loads(last.read_text())


def command(stage: str) -> str:
    """Returns the name by which `animegamer train` knows a stage that is no part of foundations."""
    return _FIRST.get(stage, stage)


def _find(stage: str) -> tuple[type[Stage[Any]], Recipe]:
    return find_stage("foundations", part=stage) if stage in PARTS else find_stage(command(stage))


def recipe_options(folder: Path, stage: str) -> list[str]:
    """Returns the options of `animegamer train` that repeat the stage's training.

    Raises:
        UserError: Its recipe has a field that no longer exists.
    """
    was, now = _recipes(folder, stage)
    if gone := [field for field in was if field not in now]:
        raise UserError(
            f"{folder / stage}: its recipe has {', '.join(gone)}, which is no longer a field "
            "of recipes: train the model again"
        )
    changed = [(field, value) for field, value in was.items() if value != now[field]]
    pairs = ((f"--{field.replace('_', '-')}", str(value)) for field, value in changed)
    return [word for pair in pairs for word in pair]


def new_fields(folder: Path, stage: str) -> list[str]:
    """Returns the fields of the stage's recipe that did not exist when it was trained."""
    was, now = _recipes(folder, stage)
    return [field for field in now if field not in was]


def _recipes(folder: Path, stage: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the recipe that the stage had, and its current one, by dotted names."""
    was = flattened(read_run_config(folder, stage)["recipe"])
    return dict(was), dict(flattened(to_json(_find(stage)[1])))


def deviations(folder: Path, bundle: Bundle, stages: Sequence[str] = STAGES) -> list[str]:
    """Returns a line per difference between the bundle and what the stages were trained for.

    Empty if each stage started from the one before, with the bundle's networks and protocol.
    """
    moved: list[str] = []
    others: dict[tuple[str, str, str], list[str]] = {}
    for stage in stages:
        config = read_run_config(folder, stage)
        if config["model"] != _left_before(folder, stage):
            moved.append(stage)
        for field, was, now in _differences(stage, config, bundle):
            others.setdefault((field, was, now), []).append(stage)
    lines = [
        f"`{field}`: {now} in the model; trained {was}: {', '.join(names)}"
        for (field, was, now), names in others.items()
    ]
    if moved:
        lines.append(
            "the stage before has another `config.json` now than the one that was started from: "
            + ", ".join(moved)
        )
    return lines


def _left_before(folder: Path, stage: str) -> str | None:
    """Returns a checkpoint's name for the model of the stage before (`TrainingRun`)."""
    number = STAGES.index(stage)
    if not number:
        return None
    file = folder / STAGES[number - 1] / "model" / "config.json"
    if not file.exists():
        return "missing"
    content = file.read_bytes()
    return f"{json.loads(content)['name']} {hashlib.sha256(content).hexdigest()[:12]}"


def _differences(
    stage: str, config: Mapping[str, Any], bundle: Bundle
) -> Iterator[tuple[str, str, str]]:
    """Returns fields of protocol and networks, as trained and as they are in the bundle."""
    kind, _ = _find(stage)
    names = sorted({*kind.needs, *kind.changes})
    was: dict[str, Any] = {f"protocol.{k}": v for k, v in flattened(config["protocol"])}
    now: dict[str, Any] = {f"protocol.{k}": v for k, v in flattened(to_json(bundle.protocol))}
    for name in names:
        was |= flattened(config["networks"].get(name) or {}, f"{name}.")
        now |= flattened(to_json(getattr(bundle.config, name)) or {}, f"{name}.")
    for field in (*was, *(field for field in now if field not in was)):
        before, after = was.get(field, _ABSENT), now.get(field, _ABSENT)
        if before != after and field not in _MEASURED.get(stage, ()):
            with_it = "without it" if before is _ABSENT else f"with {shown(before)}"
            yield field, with_it, "absent" if after is _ABSENT else shown(after)
