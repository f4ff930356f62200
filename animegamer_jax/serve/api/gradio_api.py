"""The API: named endpoints, called with `gradio_client` or over HTTP.

Input of any type and every error are answered with one line, never with Python's own text.
"""

import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import gradio as gr

from animegamer_jax.errors import UserError
from animegamer_jax.serve.engine.engine import TurnRequest, whole_number
from animegamer_jax.serve.guard.limits import current_client
from animegamer_jax.storage.serialization import shown

if TYPE_CHECKING:
    from animegamer_jax.serve.page import Page

_INTERNAL = "an internal error: the server's log has it; try again"


class Api:
    """The endpoints of a page."""

    def __init__(self, page: "Page"):
        self.page, self.engine = page, page.engine

    def _endpoint(self, function: Any) -> Any:
        return answering(checking(function), hide=self.page.hide)

    def add(self) -> None:
        """Declares the endpoints within the page that is being built."""
        for function in (
            self.new_game, self.play_turn, self.try_again, self.progress, self.stop, self.undo,
            self.branch, self.show,
        ):  # fmt: skip
            gr.api(self._endpoint(function), api_name=function.__name__, concurrency_limit=None)
        # Files go through components, which upload, check and download them.
        name = gr.Textbox(visible=False, label="game")
        turn = gr.Number(visible=False, precision=0, label="turn")
        sent = gr.File(visible=False, label="archive")
        got, answer = gr.File(visible=False), gr.JSON(visible=False)
        press = gr.Button(visible=False)
        picture = gr.File(visible=False, label="picture")
        text = gr.Textbox(visible=False, label="text")
        numbers = [
            gr.Number(0, visible=False, precision=0, label=label)
            for label in ("seed", "window", "steps")
        ]
        for function, inputs, output in (
            (self.new_game_from_picture, [picture, text, *numbers], answer),
            (self.clip, [name, turn], got),
            (self.download, [name], got),
            (self.load, [sent], answer),
        ):
            press.click(
                self._endpoint(function), inputs, output, api_name=function.__name__,
                concurrency_limit=None,
            )  # fmt: skip

    def new_game(self, seed: int = 0, window: int = 0, steps: int = 0) -> dict:
        """Starts a game and returns its state (`show`). Window, steps: 0 for the server's own."""
        page = self.page
        name = page.new_game(seed, window or self.engine.player.window, steps or page.steps)
        return self.show(name)

    def new_game_from_picture(
        self, picture: str | None, text: str, seed: int = 0, window: int = 0, steps: int = 0
    ) -> dict:
        """Starts a game from a picture or a video's first frame, and returns its state.

        `text` says who is in it, what they do and where. Window, steps: 0 for the server's own.
        """
        page = self.page
        window, steps = window or self.engine.player.window, steps or page.steps
        return self.show(page.new_game_from_picture(picture, text, seed, window, steps)[0])

    def play_turn(self, game: str, instruction: str, level: int = 0) -> dict:
        """Plays a turn and returns it. `level`: motion level, 0 for the model's own."""
        return self._wait(
            self.engine.submit(game, instruction, level=level, client=current_client())
        )

    def try_again(self, game: str, seed: int, level: int = 0) -> dict:
        """Plays the last turn again from another seed and returns it."""
        return self._wait(self.page.play_again(game, seed=seed, level=level))

    def _wait(self, request: TurnRequest) -> dict:
        request.wait()
        if request.turn is None:
            raise UserError(request.error or "stopped")
        return dataclasses.asdict(request.turn)

    def progress(self, game: str) -> dict:
        """Returns a turn's status, queue position, stage, step and seconds left."""
        self.page.find(game)
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
        self.page.find(game)
        return self.engine.stop(game)

    def undo(self, game: str) -> dict:
        """Removes the last turn and returns the game's state."""
        self.page.undo_turn(game)
        return self.show(game)

    def branch(self, game: str, turns: int) -> dict:
        """Copies the first turns of a game to a new game and returns its state."""
        return self.show(self.page.branch_game(game, turns))

    def show(self, game: str) -> dict:
        """Returns a game's id, settings, picture, meters and turns, as in `game.json`."""
        found = self.page.find(game)
        return {
            "game": game,
            **{name: getattr(found, name) for name in ("model", "seed", "window", "steps")},
            "picture": found.picture and dataclasses.asdict(found.picture),
            "meters": dataclasses.asdict(found.meters),
            "turns": [dataclasses.asdict(turn) for turn in found.turns],
        }

    def clip(self, game: str, turn: int) -> str:
        """Returns a turn's clip, an MP4 file."""
        found = self.page.find(game)
        turns = found.turns
        if not 1 <= turn <= len(turns):
            raise UserError(f"turn {turn}: expected 1 to {len(turns)}")
        try:
            return self.page.file(found.folder / turns[turn - 1].clip)
        except FileNotFoundError as error:
            raise UserError(f"turn {turn} was undone meanwhile") from error

    def download(self, game: str) -> str:
        """Returns the game as a zip: clips, the movie of all of them, `game.json`, storyboard."""
        return self.page.pack(game)

    def load(self, archive: str | None) -> dict:
        """Loads a downloaded game and returns its state."""
        return self.show(self.page.load_game(archive))


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
    """Wraps a function or a generator that a client calls, so that each error is one line.

    Args:
        function: The function.
        hide: Returns the text of an error, without what clients need not know.
    """

    def answer(error: Exception) -> gr.Error:
        if isinstance(error, UserError):
            return gr.Error(hide(error), print_exception=False)
        logging.getLogger(__name__).error("a request failed", exc_info=error)
        return gr.Error(_INTERNAL, print_exception=False)

    @functools.wraps(function)
    def returning(*args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:
            raise answer(error) from error

    @functools.wraps(function)
    def yielding(*args: Any) -> Iterator[Any]:
        try:
            yield from function(*args)
        except Exception as error:
            raise answer(error) from error

    return yielding if inspect.isgeneratorfunction(function) else returning
