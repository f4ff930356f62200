"""Checkpoints of a training run: written in the background; the last few and the best are kept.

A checkpoint holds the trained weights, their average, the optimizer's state, the step, the position
of the data iterator and the run's configuration: stage, recipe, sizes, protocol, datasets. The
frozen weights are in the bundle from which the run started, and all random numbers follow from the
recipe's seed and the step. Arrays are restored with the shardings of a given state, so the mesh and
the number of devices and hosts may change between runs. Their checksums do not depend on the
sharding: each is a sum over the array's elements, computed where they are.

A checkpoint is evaluated after it was saved, so `scores.json` in the same folder holds the scores.
"""

import contextlib
import errno
import functools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, UInt32
from orbax.checkpoint import checkpoint_managers as managers

from animegamer_jax.bundle.arrays import load_arrays, open_folder
from animegamer_jax.distributed import raise_on_all_hosts
from animegamer_jax.errors import UserError, first_line
from animegamer_jax.storage.paths import is_bucket, user_errors
from animegamer_jax.storage.serialization import first_difference, flattened, read_json
from animegamer_jax.storage.untrusted import check_file
from animegamer_jax.train.optimizer import parameter_path
from animegamer_jax.train.step import TrainState

# Fields of a run that may change from one start to the next.
FREE = (
    *("recipe.accumulate", "recipe.remat", "recipe.result_dtype", "recipe.log_every"),
    *("recipe.save_every", "recipe.keep_last", "recipe.eval_every", "recipe.eval_batches"),
    *("recipe.eval_clips", "recipe.eval_sampling_steps"),
)
_SCORES_FILE = "scores.json"
_RUN_CONFIG, _CHECKSUMS = "run_config", "checksums"  # names of these items in a checkpoint
_RESERVE = 1 << 20  # bytes that a checkpoint needs besides its arrays, on each host


def differing_field(stored: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    """Returns the first field in which two configurations differ, with both values, or None.

    `recipe.steps` may grow; it may also fall if the learning rate does not depend on it.
    """
    free = set(FREE)
    if dict(flattened(stored)).get("recipe.optimizer.decay") == "constant":
        free.add("recipe.steps")
    if extended_from(stored, found) is not None:
        free.add("recipe.steps")
    return first_difference(stored, found, free=free)


def extended_from(stored: Mapping[str, Any], found: Mapping[str, Any]) -> int | None:
    """Returns the earlier number of steps if a run with a cosine schedule was made longer."""
    before, now = dict(flattened(stored)), dict(flattened(found))
    steps, more = before.get("recipe.steps"), now.get("recipe.steps")
    if steps is None or more is None or before.get("recipe.optimizer.decay") != "cosine":
        return None
    return steps if more > steps else None


def _named_leaves(state: TrainState) -> tuple[dict[str, jax.Array], Any]:
    """Returns the arrays that a checkpoint stores, by dotted name, and their tree."""
    flat, tree = jax.tree_util.tree_flatten_with_path(state._replace(graphdef=None, frozen=None))
    return {parameter_path(path): leaf for path, leaf in flat}, tree


def _checksum(x: Array) -> UInt32[Array, ""]:
    """Sums an array's bits, each element times an odd number of its own, modulo 2^32.

    So a flipped bit always changes the sum, and the order of the additions never does.
    """
    kind = jnp.uint32 if x.dtype.itemsize >= 4 else f"uint{8 * x.dtype.itemsize}"
    bits = x.astype("uint8") if x.dtype == bool else jax.lax.bitcast_convert_type(x, kind)
    place = jnp.zeros(bits.shape, jnp.uint32)
    for axis, size in enumerate(bits.shape):
        place = place * size + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    factors = 2 * jnp.uint32(0x9E3779B1) * place + 1
    return (bits.astype(jnp.uint32) * factors).sum(dtype=jnp.uint32)


@functools.lru_cache(maxsize=4)
def _checksums_on(mesh: Mesh | None) -> Callable[[list[Array]], UInt32[Array, " n"]]:
    """Returns the program that computes the checksums of arrays, on every host of a mesh."""
    everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    return jax.jit(lambda arrays: jnp.stack(list(map(_checksum, arrays))), out_shardings=everywhere)


def _checksums(leaves: Mapping[str, jax.Array]) -> dict[str, int]:
    """Returns the checksum of each array by name, the same on every host."""
    mesh = getattr(next(iter(leaves.values())).sharding, "mesh", None)
    found = jax.device_get(_checksums_on(mesh)(list(leaves.values())))
    return dict(zip(leaves, map(int, found), strict=True))


class _KeepBest(managers.PreservationPolicy):
    """Keeps the best checkpoint; `best_of` returns the best of some steps."""

    def __init__(self, best_of: Callable[[Sequence[int]], int | None]):
        self._best_of = best_of

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: managers.PreservationContext
    ) -> list[bool]:
        del context
        best = self._best_of([checkpoint.step for checkpoint in checkpoints])
        return [checkpoint.step == best for checkpoint in checkpoints]


def _remove(place: epath.Path) -> str:
    return f"remove {place} to start from the checkpoint before it"


class Checkpoints:
    """The checkpoints of one run, in one folder.

    Args:
        folder: Absolute path of the folder, which is created if missing. Incomplete checkpoints
            in it are removed.
        run_config: Configuration of the run, as JSON.
        keep_last: Number of checkpoints to keep besides the best.
        best_mode: Whether the best score is the "min" or the "max".

    Attributes:
        scores: Score of each evaluated checkpoint by step; None: it was not finite.
        extended_from: Number of steps of the last checkpoint's cosine, if it was checked and this
            run's is longer.
    """

    def __init__(
        self, folder: epath.Path, *, run_config: Mapping[str, Any], keep_last: int, best_mode: str
    ):
        self.folder, self._run_config = folder, dict(run_config)
        self._choose = min if best_mode == "min" else max
        self.scores: dict[int, float | None] = {}
        self._latest_score: tuple[int, float] | None = None
        self.extended_from: int | None = None
        keep = [managers.LatestN(keep_last), _KeepBest(self._best_of)]
        options = ocp.CheckpointManagerOptions(
            preservation_policy=managers.AnyPreservationPolicy(keep),
            cleanup_tmp_directories=True,
            enable_async_checkpointing=True,
        )
        with self._using("cannot be used"):
            self._manager = ocp.CheckpointManager(
                folder,
                options=options,
                item_handlers={
                    "state": ocp.PyTreeCheckpointHandler(),
                    "data": ocp.JsonCheckpointHandler(),
                    _CHECKSUMS: ocp.JsonCheckpointHandler(),
                    _RUN_CONFIG: ocp.JsonCheckpointHandler(),
                },
            )
            self.scores = self._read_scores()
        self._saved = max(self.steps(), default=None)

    def _using(self, problem: str) -> contextlib.AbstractContextManager[None]:
        hint = "free space there, then start the same command again: it resumes the run"
        return user_errors(self.folder, problem, hint=hint)

    def steps(self) -> list[int]:
        """Returns the steps of all complete checkpoints, in order."""
        return sorted(self._manager.all_steps())

    def best_step(self) -> int | None:
        """Returns the step of the best checkpoint with a finite score; None if there is none."""
        return self._best_of(self.steps())

    def _best_of(self, steps: Sequence[int]) -> int | None:
        scores = {step: score for step in steps if (score := self.scores.get(step)) is not None}
        return self._choose(scores, key=scores.__getitem__) if scores else None

    def _read_scores(self) -> dict[int, float | None]:
        file = self.folder / _SCORES_FILE
        if not file.exists():
            return {}
        scores = read_json(file, dict[str, float | None], hint="remove it")
        try:
            return {int(step): score for step, score in scores.items()}
        except ValueError:
            raise UserError(
                f"{file}: expected steps, found {list(scores)[:3]!a}: remove it"
            ) from None

    def set_score(self, step: int, score: float) -> None:
        """Stores the score of a step, now or as soon as its checkpoint is saved.

        A score that is not finite is never the best.

        Raises:
            UserError: On any host, the scores cannot be written.
        """
        self._latest_score = step, score
        if step == self._saved:
            self._write_score()

    @raise_on_all_hosts()
    def _write_score(self) -> None:
        assert self._latest_score is not None
        step, score = self._latest_score
        existing = {*self.steps(), step}
        self.scores = {k: v for k, v in self.scores.items() if k in existing}
        self.scores[step] = score if math.isfinite(score) else None
        if jax.process_index() == 0:
            file, part = self.folder / _SCORES_FILE, self.folder / f"{_SCORES_FILE}.part"
            with self._using("the scores cannot be written"):
                part.write_text(json.dumps(self.scores) + "\n")
                part.replace(file)

    def check(self, step: int | None = None) -> int:
        """Returns the step of a checkpoint, by default the last, from which this run can continue.

        Raises:
            UserError: There is none, it is damaged, or it was written with another configuration.
        """
        self.wait()
        steps = self.steps()
        step = steps[-1] if step is None and steps else step
        if step not in steps:
            existing = ", ".join(map(str, steps)) or "none"
            wanted = "a checkpoint" if step is None else f"a checkpoint of step {step}"
            raise UserError(f"{self.folder}: expected {wanted}, found {existing}")
        if not (self.folder / str(step) / _RUN_CONFIG).exists():
            raise UserError(
                f"{self.folder}: the checkpoint of step {step} has no {_RUN_CONFIG}: another "
                "version of animegamer_jax wrote it: train again with --start fresh, or another "
                "--out"
            )
        if not is_bucket(self.folder):  # Orbax would wait for a pipe
            for path in Path(self.folder / str(step)).rglob("*"):
                check_file(path)
        with self._reading(step):
            items = ocp.args.Composite(**{_RUN_CONFIG: ocp.args.JsonRestore()})
            stored = self._manager.restore(step, args=items)[_RUN_CONFIG]
        if (field := differing_field(stored, self._run_config)) is None:
            self.extended_from = extended_from(stored, self._run_config)
            return step
        if field.startswith("data.") and field.split()[0].endswith(".content"):
            name = self._run_config["data"][field.split(".")[1]]["name"]
            raise UserError(
                f"{self.folder}: the dataset {name} differs from the one that the checkpoint of "
                f"step {step} was trained on ({field}): train on that one, or choose another --out"
            )
        raise UserError(
            f"{self.folder}: the checkpoint of step {step} has another configuration: {field}: "
            "start with the earlier value, or choose another --out"
        )

    def restore(self, state: TrainState, *, step: int | None = None) -> tuple[TrainState, Any]:
        """Returns the state of a checkpoint, by default the last, and the position of the data.

        It is checked first, see `check`. `state` is a new state of the same run, whose arrays are
        deleted.

        Raises:
            UserError: As `check`, or, on every host, the arrays are damaged.
        """
        step = self.check(step)
        leaves, tree = _named_leaves(state)
        wanted = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            for name, x in leaves.items()
        }
        for leaf in leaves.values():
            leaf.delete()  # two copies of the optimizer's state may not fit
        folder = self.folder / str(step)
        items = {"data": ocp.args.JsonRestore()}
        if (folder / _CHECKSUMS).exists():  # earlier versions have none
            items[_CHECKSUMS] = ocp.args.JsonRestore()
        with self._reading(step):
            with open_folder(folder / "state") as saved:
                arrays = load_arrays(saved, wanted)
            stored = self._manager.restore(step, args=ocp.args.Composite(**items))
        if _CHECKSUMS in items and stored[_CHECKSUMS] != _checksums(arrays):
            raise UserError(
                f"{folder}: damaged (the arrays differ from their checksums): {_remove(folder)}"
            )
        position = stored["data"]
        restored = jax.tree.unflatten(tree, [arrays[name] for name in leaves])
        return restored._replace(graphdef=state.graphdef, frozen=state.frozen), position

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        place = self.folder / str(step)
        hint = _remove(place)
        try:
            with user_errors(place, "cannot be read", hint=hint):
                yield
        except (ValueError, KeyError, AttributeError, TypeError) as error:  # from damaged files
            raise UserError(f"{place}: damaged ({first_line(error)}): {hint}") from error

    def save(self, state: TrainState, data: Any) -> None:
        """Starts to write a checkpoint, unless the state's step is saved already.

        The state may be donated as soon as this returns. `data` is the position of the data
        iterator, as JSON.

        Raises:
            UserError: This checkpoint or the one before cannot be written; earlier ones stay valid.
        """
        step = int(state.step)
        if step == self._saved:
            return
        leaves, _ = _named_leaves(state)
        items = {
            "state": ocp.args.PyTreeSave(unflatten_dict(leaves, sep=".")),
            "data": ocp.args.JsonSave(data),
            _CHECKSUMS: ocp.args.JsonSave(_checksums(leaves)),
            _RUN_CONFIG: ocp.args.JsonSave(self._run_config),
        }
        self.wait()
        with raise_on_all_hosts(), self._using("a checkpoint cannot be written"):
            self._check_space(leaves)
        with self._using("a checkpoint cannot be written"):
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)
        self._saved = step
        if self._latest_score is not None and self._latest_score[0] == step:
            self._write_score()

    def _check_space(self, leaves: Mapping[str, jax.Array]) -> None:
        """Refuses a full disk before Orbax does, which prints a traceback for each array.

        Raises:
            OSError: Too little space is left.
        """
        shards = (shard for leaf in leaves.values() for shard in leaf.addressable_shards)
        needed = _RESERVE + sum(shard.data.nbytes for shard in shards if shard.replica_id == 0)
        if not is_bucket(self.folder) and shutil.disk_usage(self.folder).free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def wait(self) -> None:
        """Waits until the last checkpoint is on disk.

        Raises:
            UserError: It cannot be written.
        """
        with self._using("a checkpoint cannot be written"):
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for the last checkpoint and ends the writing threads."""
        with self._using("a checkpoint cannot be written"):
            self._manager.close()
