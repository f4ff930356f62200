"""The API of `gradio_client`: named endpoints, which go through Gradio's queue.

Input of any type and every error are answered with one line, never with Python's own text.
"""

import functools
import inspect
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradio as gr
from gradio import processing_utils

from animegamer_jax.errors import UserError
from animegamer_jax.serve.api import answers
from animegamer_jax.serve.api.actions import Actions
from animegamer_jax.serve.engine.engine import whole_number
from animegamer_jax.serve.engine.turn_request import TurnRequest
from animegamer_jax.serve.guard.limits import current_client
from animegamer_jax.storage.serialization import shown, to_json


class GradioApi:
    """The endpoints.

    Args:
        actions: What clients can do.
    """

    def __init__(self, actions: Actions):
        self.actions, self.engine = actions, actions.engine

    def build(self) -> gr.Blocks:
        """Builds the blocks that hold the endpoints; they have no page of their own."""
        with Blocks(title="AnimeGamer", analytics_enabled=False) as blocks:
            self._add()
        return blocks

    def _endpoint(self, function: Any) -> Any:
        return answering(checking(function), hide=self.actions.hide)

    def _add(self) -> None:
        """Declares the endpoints within the blocks that are being built."""
        for function in (
            self.new_game, self.play_turn, self.try_again, self.progress, self.stop, self.undo,
            self.redo, self.branch, self.show,
        ):  # fmt: skip
            gr.api(self._endpoint(function), api_name=function.__name__, concurrency_limit=None)
        # Files go through components, which upload, check and download them.
        name = gr.Textbox(visible=False, label="game")
        turn = gr.Number(visible=False, precision=0, label="turn")
        sent = gr.File(visible=False, label="archive")
        self._got, answer = gr.File(visible=False), gr.JSON(visible=False)
        press = gr.Button(visible=False)
        picture = gr.File(visible=False, label="picture")
        text = gr.Textbox(visible=False, label="text")
        numbers = [
            gr.Number(0, visible=False, precision=0, label=label)
            for label in ("seed", "window", "steps")
        ]
        for function, inputs, output in (
            (self.new_game_from_picture, [picture, text, *numbers], answer),
            (self.clip, [name, turn], self._got),
            (self.download, [name], self._got),
            (self.load, [sent], answer),
        ):
            press.click(
                self._endpoint(function), inputs, output, api_name=function.__name__,
                concurrency_limit=None,
            )  # fmt: skip

    def new_game(self, seed: int = 0, window: int = 0, steps: int = 0) -> dict:
        """Starts a game and returns its state (`show`). Window, steps: 0 for the server's own."""
        name = self.actions.new_game(
            client=current_client(), seed=seed, window=window or None, steps=steps or None
        )
        return self.show(name)

    def new_game_from_picture(
        self, picture: str | None, text: str, seed: int = 0, window: int = 0, steps: int = 0
    ) -> dict:
        """Starts a game from a picture or a video's first frame, and returns its state.

        `text` says who is in it, what they do and where. Window, steps: 0 for the server's own.
        """
        name, _ = self.actions.new_game_from_picture(
            Path(picture) if picture else None,
            text,
            client=current_client(),
            seed=seed,
            window=window or None,
            steps=steps or None,
        )
        return self.show(name)

    def play_turn(self, game: str, instruction: str, level: int = 0) -> dict:
        """Plays a turn and returns it. `level`: motion level, 0 for the model's own."""
        return self._wait(
            self.actions.play(game, instruction, level=level, client=current_client())
        )

    def try_again(self, game: str, seed: int, level: int = 0) -> dict:
        """Plays the last turn again from another seed and returns it."""
        return self._wait(
            self.actions.play_again(game, seed=seed, level=level, client=current_client())
        )

    def _wait(self, request: TurnRequest) -> dict:
        request.wait()
        if request.turn is None:
            raise UserError(request.error or "stopped")
        return to_json(request.turn)

    def progress(self, game: str) -> dict:
        """Returns a turn's status, queue position, stage, step and seconds left."""
        self.actions.find(game, client=current_client())
        request = self.engine.request_of(game)
        if request is None:
            return {"status": "idle"}
        return {
            "status": request.status,
            "queue_position": self.engine.queue_position(request),
            "stage": request.stage,
            "step": request.step,
            "steps": request.num_steps,
            "seconds_left": request.seconds_left,
        }

    def stop(self, game: str) -> bool:
        """Stops the turn that is waiting or being played; returns whether there was one."""
        self.actions.find(game, client=current_client())
        return self.engine.stop(game)

    def undo(self, game: str) -> dict:
        """Sets the last turn aside and returns the game's state."""
        self.actions.undo(game, client=current_client())
        return self.show(game)

    def redo(self, game: str) -> dict:
        """Brings the turn back that was set aside last and returns the game's state."""
        self.actions.redo(game, client=current_client())
        return self.show(game)

    def branch(self, game: str, turns: int) -> dict:
        """Copies the first turns of a game to a new game and returns its state."""
        return self.show(self.actions.copy_game(game, turns, client=current_client()))

    def show(self, game: str) -> dict:
        """Returns a game's id, settings, picture, meters and turns, as in `game.json`."""
        found = self.actions.find(game, client=current_client())
        return {
            "game": game,
            **{name: getattr(found, name) for name in ("model", "seed", "window", "steps")},
            "picture": found.picture and to_json(found.picture),
            "meters": to_json(found.meters),
            "turns": [to_json(turn) for turn in found.turns],
        }

    def clip(self, game: str, turn: int) -> str:
        """Returns a turn's clip, an MP4 file."""
        found = self.actions.find(game, client=current_client())
        turns = found.turns
        if not 1 <= turn <= len(turns):
            raise UserError(f"turn {turn}: expected 1 to {len(turns)}")
        try:
            return self._send(found.folder / turns[turn - 1].clip)
        except FileNotFoundError as error:
            raise UserError(f"turn {turn} was undone meanwhile") from error

    def _send(self, path: Path) -> str:
        """Copies a file to Gradio's cache, so that a client gets no access to any folder."""
        return processing_utils.save_file_to_cache(path, cache_dir=self._got.GRADIO_CACHE)

    def download(self, game: str) -> str:
        """Returns the game as a zip: clips, the movie of all of them, `game.json`, storyboard."""
        with tempfile.TemporaryDirectory(dir=self.actions.folder) as temporary:
            path = Path(temporary) / "animegamer.zip"
            self.actions.pack(game, path, client=current_client())
            return self._send(path)

    def load(self, archive: str | None) -> dict:
        """Loads a downloaded game and returns its state."""
        path = Path(archive) if archive else None
        return self.show(self.actions.load_game(path, client=current_client()))


class Blocks(gr.Blocks):
    """Gradio's blocks, which refuse inputs that a component cannot read in one line."""

    async def preprocess_data(self, block_fn: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super().preprocess_data(block_fn, inputs, *args, **kwargs)
        except gr.Error:
            raise
        except Exception as error:
            labels = [getattr(block, "label", None) or "a value" for block in block_fn.inputs]
            raise gr.Error(
                f"{block_fn.api_name or 'the page'}: expected {', '.join(labels) or 'no inputs'}, "
                "found inputs that cannot be read: see the description of the API",
                print_exception=False,
            ) from error


def checking(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function of the API, so that arguments of a wrong type are `UserError`s.

    None stands for the default, if there is one.
    """
    parameters = inspect.signature(function).parameters

    @functools.wraps(function)
    def checked(*args: Any) -> Any:
        pairs = zip(parameters.values(), args, strict=False)
        return function(*(_check(parameter, value) for parameter, value in pairs))

    return checked


def _check(parameter: inspect.Parameter, value: Any) -> Any:
    if value is None and parameter.default is not parameter.empty:
        return parameter.default
    if parameter.annotation is int:
        return whole_number(parameter.name, value)
    optional = parameter.annotation is not str and value is None
    if not (isinstance(value, str) or optional):
        raise UserError(f"{parameter.name}: expected a text, found {shown(value)}")
    return value


def answering(function: Callable[..., Any], *, hide: Callable[[UserError], str]) -> Any:
    """Wraps a function that a client calls, so that each error is one line.

    Args:
        function: The function.
        hide: Returns the text of an error, without what clients need not know.
    """

    def answer(error: Exception) -> gr.Error:
        if isinstance(error, UserError):
            return gr.Error(hide(error), print_exception=False)
        logging.getLogger(__name__).error("a request failed", exc_info=error)
        return gr.Error(answers.INTERNAL_ERROR, print_exception=False)

    @functools.wraps(function)
    def returning(*args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:
            raise answer(error) from error

    return returning
