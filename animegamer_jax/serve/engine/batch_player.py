"""Plays a batch of turns, shows its first pictures and saves its turns."""

import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from animegamer_jax.game.player import Player
from animegamer_jax.game.turn_output import Preview, TurnOutput
from animegamer_jax.media.sheets import encode_quick
from animegamer_jax.progress import Progress
from animegamer_jax.serve.engine.turn_request import FirstPicture, TurnRequest
from animegamer_jax.serve.games.game_store import GameStore

_PICTURE_ROWS = 240  # most of a first picture


class BatchPlayer:
    """Plays batches on the threads that call it; pictures and turns are saved by its own threads.

    Args:
        player: The player.
        store: The games.
        batch_sizes: Sizes in ascending order, to which batches are padded.
        first_pictures: Whether the picture that the model draws first is shown, or a guess of the
            clip's first frame after half of the steps.
    """

    def __init__(
        self,
        player: Player,
        store: GameStore,
        *,
        batch_sizes: Sequence[int],
        first_pictures: bool,
    ):
        self._player, self._store = player, store
        self._batch_sizes, self._first_pictures = tuple(batch_sizes), first_pictures
        self._savers = ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix="save")

    def compile(self, size: int) -> None:
        """Compiles the programs of a batch size, by playing a turn."""
        self._player.play_turn(
            self._player.start(size),
            ["Motion: wave."] * size,
            seeds=[0] * size,
            turn=[1] * size,
            steps=None if self._player.protocol.student_timesteps else 2,  # one step has no guess
            on_frames=(lambda preview: None) if self._first_pictures else None,
            by_chunk=False,
        )

    def play(self, batch: Sequence[TurnRequest], *, on_progress: Progress) -> TurnOutput:
        """Plays turns of the same number of steps, at most the largest batch size of them.

        Args:
            batch: The requests.
            on_progress: Called between two steps; what it raises ends the batch.

        Returns:
            What was played, with rows for the padding after those of the batch.

        Raises:
            UserError: A turn of the batch cannot be played.
        """
        size = next(size for size in self._batch_sizes if size >= len(batch))
        rows = [*batch, *[batch[0]] * (size - len(batch))]
        histories = [
            self._store.get(r.game).history(before=r.after + 1, window=r.window) for r in batch
        ]
        window = self._player.restore([*histories, *[histories[0]] * (size - len(batch))])

        def on_frames(preview: Preview) -> None:
            for row, request in enumerate(batch):
                self._savers.submit(_show, request, preview, row)

        _, output = self._player.play_turn(
            window,
            [request.instruction for request in rows],
            seeds=[request.seed for request in rows],
            turn=[request.after + 1 for request in rows],
            steps=batch[0].steps,
            levels=[request.level for request in rows],
            on_progress=on_progress,
            on_frames=on_frames if self._first_pictures else None,
            by_chunk=False,
        )
        return output

    def save(self, batch: Sequence[TurnRequest], output: TurnOutput) -> None:
        """Saves each row as a turn of its game, unless it was stopped; ends the requests."""
        list(self._savers.map(lambda row: self._save(batch[row], output, row), range(len(batch))))

    def _save(self, request: TurnRequest, output: TurnOutput, row: int) -> None:
        if request.stop_requested:
            request.end("stopped")
            return
        try:
            with self._store.use(request.game) as game:
                request.turn = game.add(
                    output.row(row),
                    request.instruction,
                    after=request.after,
                    seed=request.seed,
                    window=request.window,
                    steps=request.steps,
                    chosen_level=bool(request.level),
                )
        except OSError as error:
            request.end("failed", error=f"the turn could not be saved: {error.strerror}")
        else:
            request.end("done")

    def close(self) -> None:
        """Waits until everything is saved, and ends the threads."""
        self._savers.shutdown()


def _show(request: TurnRequest, preview: Preview, row: int) -> None:
    """Encodes a batch's row as a first picture and shows it; no turn waits for that."""
    try:
        jpeg = encode_quick(preview.frames[row, 0], rows=_PICTURE_ROWS)
        request.show(FirstPicture(jpeg, preview.steps, request.steps))
    except Exception:  # the turn continues
        logging.getLogger(__name__).exception("a first picture could not be shown")
