r"""Trains a stage twice, once uninterrupted, once killed, terminated and resumed, and compares.

    python scripts/check_resume.py foundations --part t5 --steps 2000 --batch-size 32 \
        --data out/toy/games --model out/toy/clip/model --scratch out/resume

The arguments are those of `animegamer train` without `--out`. The second run gets SIGKILL at a
random step of its first half and SIGTERM at one of its second half. Losses and final weights must
be equal bit for bit.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from animegamer_jax.bundle.bundle import NETWORKS, Bundle
from animegamer_jax.train.metric_logger import METRICS_FILE, is_clocked, read_metrics


def last_step(out: Path) -> int:
    """Returns the last step in a run's records; 0 if there is none."""
    lines = read_metrics(out / METRICS_FILE)
    return int(lines[-1].value["step"] or 0) if lines else 0


def run(arguments: list[str], out: Path, *, stop: tuple[int, signal.Signals] | None = None) -> str:
    """Starts the command once, stops it at `stop` = (step, signal), and says how it ended."""
    command = [sys.executable, "-m", "animegamer_jax.cli", "train", *arguments, "--out", str(out)]
    with open(f"{out}.log", "a") as log:
        child = subprocess.Popen(command, stderr=log, stdout=log)
        while stop is not None and last_step(out) < stop[0]:
            if child.poll() is not None:
                raise SystemExit(f"{out}.log: the run ended before its signal")
            time.sleep(0.01)
        if stop is not None:
            child.send_signal(stop[1])
        code = child.wait()
    if stop is None and code:
        raise SystemExit(f"{out}.log: the run failed with {code}")
    return f"ended with status {code} at step {last_step(out)}"


def curve(out: Path) -> list[dict[str, Any]]:
    """Returns the records without fields that depend on the clock."""
    records = [line.value for line in read_metrics(out / METRICS_FILE)]
    return [{k: v for k, v in record.items() if not is_clocked(k)} for record in records]


def weights(out: Path) -> dict[str, np.ndarray]:
    """Returns all weights of a run's result."""
    bundle = Bundle.open(out / "model")
    return {
        f"{name}.{path}": leaf
        for name in NETWORKS
        if bundle.has(name)
        for path, leaf in bundle.read_in_order(name, bundle.leaves(name))
    }


def main(arguments: list[str]) -> int:
    """Runs both and prints the comparison; returns 0 if everything is equal."""
    if not {"--scratch", "--steps"} <= set(arguments):
        raise SystemExit(__doc__)
    index = arguments.index("--scratch")
    scratch, seed = Path(arguments[index + 1]), int.from_bytes(os.urandom(4), "big")
    del arguments[index : index + 2]
    steps = int(arguments[arguments.index("--steps") + 1])
    random.seed(seed)
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    kill, term = random.randrange(1, steps // 2), random.randrange(steps // 2, steps - 20)
    print(f"seed {seed}: SIGKILL after step {kill}, SIGTERM after step {term}", flush=True)
    whole, parts = scratch / "whole", scratch / "parts"
    print("uninterrupted:", run(arguments, whole), flush=True)
    print("SIGKILL:", run(arguments, parts, stop=(kill, signal.SIGKILL)), flush=True)
    print("SIGTERM:", run(arguments, parts, stop=(term, signal.SIGTERM)), flush=True)
    print("to the end:", run(arguments, parts), flush=True)
    a, b = curve(whole), curve(parts)
    same_curve = a == b
    print(f"{len(a)} records {'equal' if same_curve else 'DIFFER'}")
    old, new = weights(whole), weights(parts)
    differing = [name for name in old if not np.array_equal(old[name], new[name])]
    print(
        f"{len(old)} arrays, {sum(x.size for x in old.values()):,} weights; differing: {differing}"
    )
    return 0 if same_curve and not differing and old.keys() == new.keys() else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
