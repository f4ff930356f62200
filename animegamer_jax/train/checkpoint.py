"""Checkpoints of a training run: written in the background, the last ones and the best are kept.

One holds the trained weights, their average, the optimizer's state and the step (the frozen
weights are in the bundle that the run started from), where the data's iterator stands, and what
the run is: stage, recipe, sizes, protocol, data sets. All that is random follows from the recipe's
seed and the step. Arrays are restored to where the state at hand has its own, so the mesh and
the number of devices and hosts may differ from those that wrote.

A checkpoint is saved before it is looked at, so its score comes later: the scores of all stand in
`scores.json` beside them.
"""

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers as managers

from animegamer_jax.errors import UserError
from animegamer_jax.storage.paths import no_late_answers, telling
from animegamer_jax.storage.serialization import first_difference, flattened, nested
from animegamer_jax.train.optimizer import parameter_path
from animegamer_jax.train.step import TrainState

# Fields of a run that may change from one start to the next.
FREE = (
    *("recipe.accumulate", "recipe.remat", "recipe.result_dtype", "recipe.log_every"),
    *("recipe.save_every", "recipe.keep_last", "recipe.watch_every", "recipe.watch_batches"),
    *("recipe.watch_clips", "recipe.watch_sampling_steps"),
)
_SCORE = "score"
_SCORES_FILE = "scores.json"


def differing_field(stored: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    """The first field in which two configurations differ, with what each says of it, or None.

    `recipe.steps` may differ where the learning rate does not depend on it. What earlier versions
    did not store of the data sets is not compared.
    """
    free, old = set(FREE), dict(flattened(stored))
    if old.get("recipe.optimizer.decay") == "constant":
        free.add("recipe.steps")
    free |= {name for name, _ in flattened(found) if _is_content(name) and name not in old}
    return first_difference(stored, found, free=free)


def _is_content(field: str) -> bool:
    """Whether a field is the digest of a data set: `data.0.content`."""
    return field.startswith("data.") and field.endswith(".content")


def _named_leaves(state: TrainState) -> tuple[dict[str, jax.Array], Any]:
    """What a checkpoint stores of a state by dotted names, and the tree that it comes from."""
    flat, tree = jax.tree_util.tree_flatten_with_path(state._replace(graphdef=None, frozen=None))
    return {parameter_path(path): leaf for path, leaf in flat}, tree


def _finite(score: float) -> float | None:
    return score if math.isfinite(score) else None


class _KeepBest(managers.PreservationPolicy):
    """Answers Orbax which checkpoints stay, by a function that knows the best of some steps."""

    def __init__(self, best_of: Callable[[Sequence[int]], int | None]):
        self._best_of = best_of

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: managers.PreservationContext
    ) -> list[bool]:
        del context
        best = self._best_of([checkpoint.step for checkpoint in checkpoints])
        return [checkpoint.step == best for checkpoint in checkpoints]


class Checkpoints:
    """The checkpoints of one run, in one folder.

    Args:
        folder: an absolute path; made where it is missing. Half-written ones in it are removed.
        about: what the run is, as JSON.
        keep_last: how many stay beside the best.
        best_mode: whether the best score is the "min" or the "max".

    Attributes:
        scores: of the checkpoints that have one, by step; None: it is not finite.
    """

    def __init__(
        self, folder: epath.Path, *, about: Mapping[str, Any], keep_last: int, best_mode: str
    ):
        self.folder, self.about = folder, dict(about)
        self._choose = min if best_mode == "min" else max
        self.scores: dict[int, float | None] = {}
        keep = [managers.LatestN(keep_last), _KeepBest(self._best_of)]
        options = ocp.CheckpointManagerOptions(
            preservation_policy=managers.AnyPreservationPolicy(keep),
            cleanup_tmp_directories=True,
            enable_async_checkpointing=True,
        )
        with self._telling("cannot be used"):
            self._manager = ocp.CheckpointManager(
                folder,
                options=options,
                item_handlers={
                    "state": ocp.PyTreeCheckpointHandler(),
                    "data": ocp.JsonCheckpointHandler(),
                    "about": ocp.JsonCheckpointHandler(),
                },
            )
            self.scores = self._read_scores()

    def _telling(self, what: str) -> contextlib.AbstractContextManager[None]:
        mend = "make room there, then start the same command again: it goes on"
        return telling(self.folder, what, mend=mend)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        with no_late_answers(), self._telling("a checkpoint cannot be written"):
            yield

    def steps(self) -> list[int]:
        """The steps of all whole checkpoints, rising."""
        return sorted(self._manager.all_steps())

    def best_step(self) -> int | None:
        """The step of the best checkpoint that has a finite score; None: none has."""
        return self._best_of(self.steps())

    def _best_of(self, steps: Sequence[int]) -> int | None:
        scores = {step: score for step in steps if (score := self.scores.get(step)) is not None}
        return self._choose(scores, key=scores.__getitem__) if scores else None

    def _read_scores(self) -> dict[int, float | None]:
        file = self.folder / _SCORES_FILE
        found: dict[int, float | None] = {}
        for step in self.steps():  # earlier versions kept them in the checkpoints
            told = self._manager.metrics(step) or {}
            if _SCORE in told:
                found[step] = _finite(told[_SCORE])
        if not file.exists():
            return found
        try:
            stored = {int(step): score for step, score in json.loads(file.read_text()).items()}
        except (ValueError, AttributeError) as error:
            raise UserError(f"{file}: damaged ({error}): remove it") from error
        return found | stored

    def set_score(self, step: int, score: float) -> None:
        """Notes how good a checkpoint is, which may still be on its way to the disk.

        Args:
            step: of the checkpoint.
            score: by which the best is told; one that is not finite is never the best.

        Raises:
            UserError: storage refused.
        """
        there = {*self.steps(), step}
        self.scores = {k: v for k, v in self.scores.items() if k in there}
        self.scores[step] = _finite(score)
        if jax.process_index() == 0:
            file, part = self.folder / _SCORES_FILE, self.folder / f"{_SCORES_FILE}.part"
            with self._telling("the scores cannot be written"):
                part.write_text(json.dumps(self.scores) + "\n")
                part.replace(file)

    def check(self, step: int | None = None) -> int:
        """The step of a checkpoint, by default the last, that this run can go on from.

        Raises:
            UserError: there is none, it is damaged, or it was written by another configuration.
        """
        steps = self.steps()
        step = steps[-1] if step is None and steps else step
        if step not in steps:
            there = ", ".join(map(str, steps)) or "none"
            raise UserError(f"{self.folder}: no checkpoint of step {step}: it has {there}")
        with self._reading(step):
            about = self._manager.restore(
                step, args=ocp.args.Composite(about=ocp.args.JsonRestore())
            )["about"]
        if (field := differing_field(about, self.about)) is None:
            return step
        if _is_content(field.split()[0]):
            number = field.split(".")[1]
            name = self.about["data"][number]["name"]
            raise UserError(
                f"{self.folder}: the data set {name} is another one than the checkpoint of step "
                f"{step} was trained on ({field}): train on the former, or choose another --out"
            )
        raise UserError(
            f"{self.folder}: the checkpoint of step {step} is of another configuration: "
            f"{field}: start with the former value, or choose another --out"
        )

    def restore(self, state: TrainState, *, step: int | None = None) -> tuple[TrainState, Any]:
        """The state of a checkpoint, by default the last, and where the data stands.

        It is checked first, see `check`.

        Args:
            state: of the same run, new; its arrays are given back as soon as they are replaced.
            step: which one.

        Raises:
            UserError: as `check`, or the arrays are damaged.
        """
        step = self.check(step)
        leaves, tree = _named_leaves(state)
        wanted = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            for name, x in leaves.items()
        }
        arguments = {
            name: ocp.ArrayRestoreArgs(
                restore_type=jax.Array, sharding=x.sharding, global_shape=x.shape, dtype=x.dtype
            )
            for name, x in wanted.items()
        }
        for leaf in leaves.values():
            leaf.delete()  # two copies of the optimizer's state need not fit
        with self._reading(step):
            found = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeRestore(
                        item=nested(wanted), restore_args=nested(arguments)
                    ),
                    data=ocp.args.JsonRestore(),
                ),
            )
        arrays = dict(flattened(found["state"]))
        restored = jax.tree.unflatten(tree, [arrays[name] for name in leaves])
        return restored._replace(graphdef=state.graphdef, frozen=state.frozen), found["data"]

    @contextlib.contextmanager
    def _reading(self, step: int | None) -> Iterator[None]:
        mend = f"remove {self.folder / str(step)} to start from the one before"
        try:
            with no_late_answers(), telling(self.folder / str(step), "cannot be read", mend=mend):
                yield
        except (ValueError, KeyError, AttributeError, TypeError) as error:  # Orbax, damaged files
            line = next(iter(str(error).splitlines()), type(error).__name__)[:160]
            raise UserError(f"{self.folder / str(step)}: damaged ({line}): {mend}") from error

    def save(self, state: TrainState, data: Any) -> None:
        """Starts to write a checkpoint; the state may be used up as soon as this returns.

        Args:
            state: what to write.
            data: where the data's iterator stands, as JSON.

        Raises:
            UserError: storage refused this write or the one before; earlier ones stay valid.
        """
        leaves, _ = _named_leaves(state)
        with self._writing():
            self._manager.save(
                int(state.step),
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeSave(nested(leaves)),
                    data=ocp.args.JsonSave(data),
                    about=ocp.args.JsonSave(self.about),
                ),
                force=True,
            )

    def wait(self) -> None:
        """Until the last checkpoint is on disk.

        Raises:
            UserError: storage refused it.
        """
        with self._writing():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, and ends the writing threads."""
        with self._writing():
            self._manager.close()
