"""Skipped denoising steps: which steps reuse what an earlier one computed, measured once a model.

What a transformer's layers add to its tokens changes little from one denoising step to the next. A
skipped step adds what an earlier step's layers added (MagCache, arXiv 2506.09045, by a ratio of
magnitudes; here the error is measured). Where the guidance scale is near one, the unconditional row
can be left out as well. Which steps to skip is computed beforehand for a model and a number of
steps, and stored as a column of the sampler's table.
"""

import dataclasses
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from animegamer_jax.diffusion import SamplerTable
from animegamer_jax.errors import UserError
from animegamer_jax.game import rollout
from animegamer_jax.storage.files import write_json
from animegamer_jax.storage.serialization import read_json, to_json

if TYPE_CHECKING:
    from animegamer_jax.bundle.bundle import Bundle
    from animegamer_jax.game.player import Player

MOST_IN_A_ROW = 4
_NEAR_ONE = 1.25  # guidance scale up to which a step may leave out the unconditional row
_HINT = "make it again with `animegamer calibrate`"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SkippedSteps:
    """The content of a file of skipped steps.

    Attributes:
        model: Name of the model that it was made for.
        digest: Digest of the model's decoder.
        steps: Number of denoising steps.
        guided: Whether the model makes clips with guidance.
        rows: Rows of guidance that each step evaluates: 2, 1 (the conditional one) or 0.
        error: Expected error of the denoised latents: their RMS over all steps.
        dense: Number of evaluations if no step is skipped; None: every step's guidance has rows.
    """

    model: str
    digest: str
    steps: int
    guided: bool
    rows: tuple[int, ...]
    error: float
    dense: int | None = dataclasses.field(default=None, metadata={"omit_default": True})

    @property
    def evaluations(self) -> int:
        """Number of evaluations of the decoder's layers on one row, in a clip."""
        return sum(self.rows)

    @property
    def speedup(self) -> float:
        """Factor by which a clip takes fewer evaluations than with all steps."""
        return (self.dense or self.steps * (1 + self.guided)) / self.evaluations

    @classmethod
    def load(cls, path: Path, bundle: "Bundle", *, steps: int | None = None) -> "SkippedSteps":
        """Reads a file for a model, which plays `steps` denoising steps (None: those of the file).

        Raises:
            UserError: The file is damaged, or of another model or number of steps.
        """
        found = cls.read(path)
        if found.digest != bundle.digest("dit"):
            raise UserError(
                f"{path}: steps to skip with the decoder of {found.model}, found another one in "
                f"{bundle.path}: make a file for it with `animegamer calibrate`"
            )
        if steps not in (None, found.steps):
            raise UserError(
                f"{path}: steps to skip of {found.steps}, found --steps {steps}: leave --steps "
                "out, or make a file for that number with `animegamer calibrate`"
            )
        return found

    @classmethod
    def read(cls, path: Path) -> "SkippedSteps":
        """Reads a file for any model.

        Raises:
            UserError: The file is missing or damaged.
        """
        found = read_json(path, cls, hint=_HINT)
        most = 1 + found.guided
        if (
            len(found.rows) != found.steps
            or found.rows[:1] != (most,)
            or not set(found.rows) <= set(range(most + 1))
        ):
            raise UserError(
                f"{path}: rows: expected {found.steps} numbers from 0 to {most}, the first of "
                f"them {most}: {_HINT}"
            )
        return found

    def save(self, path: Path) -> None:
        """Writes the file."""
        write_json(path, to_json(self))

    def apply(self, table: SamplerTable, *, guided: bool) -> SamplerTable:
        """Returns the sampler's table with the column of evaluated rows.

        Raises:
            UserError: The table has another number of steps or other guidance.
        """
        if len(table.step) != self.steps or guided < self.guided:
            raise UserError(
                f"skipped steps of {self.model}: expected {self.steps} steps "
                f"{'with' if self.guided else 'without'} guidance, found {len(table.step)}: {_HINT}"
            )
        rows = np.array(self.rows, np.int32)
        if guided and not self.guided:  # on a mesh, where both rows are always evaluated
            rows = 2 * rows
        return table._replace(rows=rows)


@dataclasses.dataclass(frozen=True)
class Errors:
    """Squared errors of the denoised latents, means over all latents of some clips.

    Attributes:
        reused: [n, k]: of a step that reuses what was added one, two ... steps before.
        one_row: [n]: of a step that leaves out the unconditional row.
    """

    reused: np.ndarray
    one_row: np.ndarray


def measure_errors(player: "Player", instructions: Sequence[str], *, seed: int = 0) -> Errors:
    """Plays some turns with all steps, and measures the errors that skipping would make.

    Args:
        player: A player of one game without skipped steps, on one device.
        instructions: Instructions of the turns.
        seed: Seed of the game.
    """
    window = player.start(1)
    reused, one_row = [], []
    for turn, text in enumerate(instructions, start=1):
        found = _measure_turn(player, window, text, seed=seed, turn=turn)
        reused.append(found.reused)
        one_row.append(found.one_row)
        window, _ = player.play_turn(window, [text], seeds=[seed], turn=turn)
    return Errors(np.mean(reused, axis=0), np.mean(one_row, axis=0))


def _measure_turn(player: "Player", window: Any, text: str, *, seed: int, turn: int) -> Errors:
    dit, unconditional = player.networks.dit, player.clip_guidance
    state = rollout.with_memory(player.predict(window, [text]), window, dit.config)
    keys = rollout.turn_keys(rollout.game_keys([seed]), jnp.asarray(turn))
    known = None
    if player.protocol.picture_first:
        drawn = jax.jit(rollout.draw_picture)(player.networks, state, player.table, keys)
        state, known = drawn.state, drawn.known
    guided = player.num_rows == 2
    table = player.table
    table = table._replace(rows=np.full(len(table.step), player.num_rows, np.int32))
    count = rollout.num_residuals(table, unconditional)
    has_memory = state.memory is not None
    sampler = rollout.start_clip(dit, keys, rows=count, known=known, has_memory=has_memory)
    step = jax.jit(rollout.denoise_clip)
    added: deque[jax.Array] = deque(maxlen=MOST_IN_A_ROW)
    reused = np.full((len(table.step), MOST_IN_A_ROW), np.inf)
    one_row = np.full(len(table.step), np.inf)
    for n in range(len(table.step)):
        row = table.part(n, n + 1)
        exact = step(dit, unconditional, state, sampler, row, keys)

        def error(rows: int, residual: jax.Array | None) -> float:
            found = step(
                dit,
                unconditional,
                state,
                sampler._replace(residual=residual),  # noqa: B023 - called in this step
                row._replace(rows=np.full(1, rows, np.int32)),  # noqa: B023
                keys,
            )
            return float(jnp.square(found.denoised - exact.denoised).mean())  # noqa: B023

        for back, residual in enumerate(added):
            reused[n, back] = error(0, residual)
        if guided:
            one_row[n] = error(1, sampler.residual)
        added.appendleft(exact.residual)
        sampler = exact
    return Errors(reused, one_row)


def choose_rows(
    errors: Errors, *, guidance: Float[np.ndarray, " n"] | None, most: int
) -> tuple[tuple[int, ...], float]:
    """Chooses the rows that each step evaluates, with the least error.

    Args:
        errors: Errors of each step.
        guidance: Guidance scale of each step; None: no guidance.
        most: Most evaluations of a row in all steps together.

    Returns:
        The rows of each step, and the sum of their squared errors.

    Raises:
        UserError: So few evaluations are not possible.
    """
    count, full = len(errors.one_row), 1 if guidance is None else 2
    # least[back, used]: least error after a step, the last evaluated one `back` steps before.
    least = np.full((MOST_IN_A_ROW + 1, most + 1), np.inf)
    choices: list[dict[tuple[int, int], tuple[int, int]]] = []
    for n in range(count):
        after = np.full_like(least, np.inf)
        choice: dict[tuple[int, int], tuple[int, int]] = {}

        def offer(back: int, used: int, error: float, rows: int, before: int) -> None:
            if used <= most and error < after[back, used]:  # noqa: B023 - called in this step
                after[back, used] = error  # noqa: B023
                choice[back, used] = rows, before  # noqa: B023

        if n == 0:
            offer(0, full, 0.0, full, 0)
        else:
            for back, used in np.argwhere(np.isfinite(least)).tolist():
                so_far = float(least[back, used])
                offer(0, used + full, so_far, full, back)
                if guidance is not None and guidance[n] <= _NEAR_ONE:
                    offer(0, used + 1, so_far + errors.one_row[n], 1, back)
                if back < MOST_IN_A_ROW:
                    offer(back + 1, used, so_far + errors.reused[n, back], 0, back)
        least = after
        choices.append(choice)
    if not np.isfinite(least).any():
        raise UserError(
            f"{most} evaluations in {count} steps: expected more, since a step is evaluated at "
            f"least every {MOST_IN_A_ROW + 1} steps"
        )
    back, used = (int(i) for i in np.unravel_index(least.argmin(), least.shape))
    total, rows = float(least[back, used]), []
    for choice in reversed(choices):
        evaluated, before = choice[back, used]
        rows.append(evaluated)
        back, used = before, used - evaluated
    return tuple(rows[::-1]), total


def scales(player: "Player") -> Float[np.ndarray, " n"]:
    """Returns the guidance scale of each of a clip's steps, of context or of motion."""
    table = player.table
    return np.asarray(table.guidance if table.motion_guidance is None else table.motion_guidance)


def count_evaluations(player: "Player") -> int:
    """Returns the evaluations of a row in a clip."""
    table = player.table
    if table.rows is not None:
        return sum(table.rows)
    return sum(rollout.num_rows(row, player.clip_guidance) for row in table.steps())


def calibrate(
    player: "Player", bundle: "Bundle", instructions: Sequence[str], *, times_fewer: float
) -> SkippedSteps:
    """Measures a model's errors and chooses the steps that it skips.

    Args:
        player: A player of the model, with the wanted number of steps.
        bundle: The model.
        instructions: Turns to play.
        times_fewer: Factor by which to reduce a clip's evaluations, 1 or more.

    Raises:
        UserError: The model is a student, or that number of steps cannot be skipped.
    """
    if player.protocol.student_timesteps:
        raise UserError(
            f"{bundle.path}: the decoder was distilled to few steps, none of which can be skipped: "
            "play it as it is"
        )
    guided = player.num_rows == 2
    guidance = scales(player) if guided else None
    errors = measure_errors(player, instructions)
    dense = count_evaluations(player)
    most = int(dense / times_fewer)
    rows, total = choose_rows(errors, guidance=guidance, most=most)
    return SkippedSteps(
        model=bundle.name,
        digest=bundle.digest("dit"),
        steps=player.steps,
        guided=guided,
        rows=rows,
        error=float(np.sqrt(total / player.steps)),
        dense=dense if dense != player.steps * (1 + guided) else None,
    )
