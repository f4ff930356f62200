"""The page and its API, in Gradio: what is pressed goes to the engine, what it says is shown."""

import dataclasses
import functools
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradio as gr
from gradio import processing_utils

from animegamer_jax.errors import UserError
from animegamer_jax.game.saved_game import Game, Meters
from animegamer_jax.serve import view
from animegamer_jax.serve.archive import pack_game
from animegamer_jax.serve.engine import Engine, Ticket
from animegamer_jax.serve.shelf import Shelf
from animegamer_jax.serve.words import Words, compose

_LOOK_EVERY = 0.2  # seconds between two looks at a turn that is being played
_LARGEST_ARCHIVE = "256mb"
_INTRODUCTION = """# AnimeGamer
Say what happens next; leave out what stays as it is."""
# A download button has no file before it is pressed: it gets one, and is pressed again.
_PRESS_SAVE = (
    "() => setTimeout(() => document.querySelector('#save-file a, #save-file').click(), 400)"
)


class Page:
    """Builds the page of an engine.

    Args:
        engine: that plays.
        words: offered for the fields of an instruction.
        steps: of denoising in a new game.
        title: of the page.
    """

    def __init__(self, engine: Engine, *, words: Words, steps: int, title: str = "AnimeGamer"):
        self.engine, self.words, self.steps, self.title = engine, words, steps, title
        self.shelf: Shelf = engine.shelf

    def build(self) -> gr.Blocks:
        """The page, not launched."""
        # Copies in Gradio's cache are looked through every hour; those of a day ago go.
        cache = (3600, 86_400)
        with gr.Blocks(title=self.title, analytics_enabled=False, delete_cache=cache) as blocks:
            self._lay_out()
            self._connect(blocks)
            Api(self).add()
        return blocks

    def _lay_out(self) -> None:
        words = self.words
        self.game = gr.BrowserState("", storage_key="animegamer-game", secret="animegamer")
        self.shown = gr.State(0)  # the turn on the screen; 0: the last
        gr.Markdown(_INTRODUCTION)
        with gr.Row(equal_height=False):
            with gr.Column(scale=3, min_width=320):
                self.clip = gr.Video(
                    label="The shot", elem_id="clip", autoplay=True, loop=True, interactive=False,
                    show_label=False, buttons=["download"],
                )  # fmt: skip
                self.about = gr.HTML(view.describe(None, 0), elem_id="about")
            with gr.Column(scale=2, min_width=300):
                self.meters = gr.HTML(view.meters(Meters(), None), elem_id="meters")
                with gr.Tabs():
                    with gr.Tab("In words"):
                        self.line = gr.Textbox(
                            label="What happens next?", lines=1, max_lines=4, elem_id="line",
                            placeholder="Mika is gently waving in the town by day.", autofocus=True,
                        )  # fmt: skip
                        self.say = gr.Button("Play", variant="primary", elem_id="play-line")
                    with gr.Tab("In parts"):
                        character = self._choice("Character", words.characters)
                        with gr.Row():
                            adverb = self._choice("Adverb", words.adverbs)
                            motion = self._choice("Motion", words.motions)
                        with gr.Row():
                            time = self._choice("Time", words.times)
                            place = self._choice("Place", words.places)
                        self.fields = [character, adverb, motion, time, place]
                        self.go = gr.Button("Play", variant="primary", elem_id="play-parts")
                self.status = gr.HTML(view.status(""), elem_id="status")
                with gr.Row():
                    self.stop = gr.Button("Stop", variant="stop", elem_id="stop", min_width=120)
                    self.undo = gr.Button("Undo", elem_id="undo", min_width=120)
                with gr.Row():
                    self.again = gr.Button("Try again", elem_id="again", min_width=120)
                    self.branch = gr.Button("Branch here", elem_id="branch", min_width=120)
        gr.Markdown("**Storyboard.** Choose a turn to see it again.")
        self.board = gr.Gallery(
            label="Storyboard", show_label=False, elem_id="board", columns=8, allow_preview=False,
            object_fit="contain", buttons=[], fit_columns=False,
        )  # fmt: skip
        with gr.Accordion("Settings", open=False):
            with gr.Row():
                self.level = gr.Dropdown(
                    [("the model decides", 0), *((str(n), n) for n in self._levels())], value=0,
                    label="Motion level", elem_id="level",
                )  # fmt: skip
                self.seed = gr.Number(
                    0, label="Seed of the game", precision=0, minimum=0, elem_id="seed"
                )
            with gr.Row():
                self.window = gr.Slider(
                    1, self.engine.player.window, value=self.engine.player.window, step=1,
                    label="Window: turns that the model sees", elem_id="window",
                )  # fmt: skip
                self.num_steps = gr.Slider(
                    1, max(100, self.steps), value=self.steps, step=1, label="Denoising steps",
                    elem_id="steps",
                )  # fmt: skip
        with gr.Row():
            self.new = gr.Button("New game", elem_id="new")
            self.save = gr.Button("Download the game", elem_id="save")
            self.load = gr.UploadButton(
                "Load a game", file_types=[".zip"], file_count="single", elem_id="load"
            )
            self.save_file = gr.DownloadButton("", visible="hidden", elem_id="save-file")

    def _levels(self) -> tuple[int, ...]:
        return tuple(self.engine.player.protocol.motion_levels)

    @staticmethod
    def _choice(label: str, words: tuple[str, ...]) -> gr.Dropdown:
        return gr.Dropdown(
            ["", *words], value="", label=label, allow_custom_value=True, min_width=120,
            elem_id=f"field-{label.lower()}",
        )  # fmt: skip

    # What the handlers give back, in this order.
    def _outputs(self) -> list[Any]:
        return [
            self.game, self.shown, self.clip, self.about, self.meters, self.board, self.status,
        ]  # fmt: skip

    def _connect(self, blocks: gr.Blocks) -> None:
        out = self._outputs()
        settings = [self.level, self.seed, self.window, self.num_steps]

        def on(event: Any, function: Any, inputs: list[Any], outputs: list[Any] | None = None):
            return event(
                function, inputs, out if outputs is None else outputs, show_progress="hidden",
                concurrency_limit=None, api_visibility="private",
            )  # fmt: skip

        on(blocks.load, self.on_load, [self.game])
        for event in (self.say.click, self.line.submit):
            on(event, self.on_line, [self.game, self.line, *settings], [*out, self.line])
        on(self.go.click, self.on_fields, [self.game, *self.fields, *settings])
        on(self.again.click, self.on_again, [self.game, *settings])
        on(self.stop.click, self.on_stop, [self.game], [self.status])
        on(self.undo.click, self.on_undo, [self.game])
        on(self.branch.click, self.on_branch, [self.game, self.shown])
        on(self.new.click, self.on_new, [self.seed, self.window, self.num_steps])
        on(self.board.select, self.on_select, [self.game])
        saved = on(self.save.click, self.on_save, [self.game], [self.save_file, self.status])
        saved.success(None, None, None, js=_PRESS_SAVE, api_visibility="private")
        on(self.load.upload, self.on_upload, [self.load])

    # What is shown.

    def _show(self, name: str, *, turn: int = 0, status: str = "", bad: bool = False) -> list[Any]:
        """All of the page for a game; `turn` 0 is its last."""
        return [*self._picture(name, turn=turn), view.status(status, bad=bad)]

    def _picture(self, name: str, *, turn: int = 0) -> list[Any]:
        game = self.shelf.get(name) if name else None
        turns = game.turns if game else []
        number = turn if 1 <= turn <= len(turns) else len(turns)
        found = turns[number - 1] if number else None
        meters = found.meters if found else (game.meters if game else None)
        unknown = ()
        if found:
            unknown = tuple(self.engine.player.tokenizer.unknown_words(found.instruction))
        return [
            name,
            0 if number == len(turns) else number,
            self.file(game.folder / found.clip) if game and found else None,
            view.describe(found, len(turns), unknown=unknown),
            view.meters(meters or Meters(), found),
            gr.Gallery(
                [(self.file(view.thumbnail(game, t)), f"turn {t.turn}") for t in turns]
                if game
                else [],
                selected_index=number - 1 if found else None,
            ),
        ]

    def file(self, path: Path) -> str:
        """A file as the browser may have it: a copy in Gradio's cache, so no folder is open."""
        return processing_utils.save_file_to_cache(path, cache_dir=self.clip.GRADIO_CACHE)

    def _say(self, text: str, *, bad: bool = False) -> list[Any]:
        """Only the line of status."""
        skip = [gr.skip()] * (len(self._outputs()) - 1)
        return [*skip, view.status(text, bad=bad)]

    def _refuse(self, name: str, error: UserError) -> list[Any]:
        """Says why not; where a turn is being played its progress has the line of status."""
        if name and self.engine.ticket_of(name) is not None:
            gr.Warning(str(error))
            return [gr.skip()] * len(self._outputs())
        return self._say(str(error), bad=True)

    # What is pressed.

    def on_load(self, name: str) -> Iterator[list[Any]]:
        """The page was opened, or opened again: the game that was played here, if it is there."""
        if not name:
            yield self._show("")
            return
        try:
            yield self._show(name, status="Welcome back.")
        except UserError as error:
            yield self._show("", status=str(error), bad=True)
            return
        ticket = self.engine.ticket_of(name)
        if ticket is not None:
            yield from self._follow(ticket)

    def on_line(
        self, name: str, line: str, level: int, seed: float, window: int, steps: int
    ) -> Iterator[list[Any]]:
        """The line is emptied once its turn is begun: what is typed from then on stays."""
        yield from self._play(name, line, level, seed, window, steps, emptied=1)

    def on_fields(
        self,
        name: str,
        character: str | None,
        adverb: str | None,
        motion: str | None,
        time: str | None,
        place: str | None,
        level: int,
        seed: float,
        window: int,
        steps: int,
    ) -> Iterator[list[Any]]:
        said = compose(
            character=character or "", adverb=adverb or "", motion=motion or "",
            time=time or "", place=place or "",
        )  # fmt: skip
        yield from self._play(name, said, level, seed, window, steps)

    def on_again(
        self, name: str, level: int, seed: float, window: int, steps: int
    ) -> Iterator[list[Any]]:
        """The last turn once more, from another seed."""
        try:
            game = self._existing(name)
            if not game.turns:
                raise UserError("no turn to try again: play one first")
            last = game.turns[-1]
            ticket = self.engine.submit(
                name, last.instruction, after=len(game.turns) - 1, seed=secrets.randbits(31),
                window=int(window), steps=int(steps), level=int(level or 0),
            )  # fmt: skip
        except UserError as error:
            yield self._refuse(name, error)
            return
        yield from self._follow(ticket)

    def on_stop(self, name: str) -> str:
        if name and self.engine.stop(name):
            return view.status("Stopped: the game is as it was before this turn.")
        return view.status("Nothing is being played.")

    def on_undo(self, name: str) -> list[Any]:
        try:
            self.undo_turn(name)
            return self._show(name, status="The last turn is undone.")
        except UserError as error:
            return self._refuse(name, error)

    def on_branch(self, name: str, shown: int) -> list[Any]:
        try:
            game = self._existing(name)
            turns = shown or len(game.turns)
            new = self.shelf.branch(name, turns)
            return self._show(new, status=f"A new game, which goes on after turn {turns}.")
        except UserError as error:
            return self._refuse(name, error)

    def on_new(self, seed: float, window: int, steps: int) -> list[Any]:
        try:
            name = self.new_game(seed, window, steps)
            return self._show(name, status="A new game.")
        except UserError as error:
            return self._say(str(error), bad=True)

    def on_select(self, name: str, event: gr.SelectData) -> list[Any]:
        try:
            turn = int(event.index) + 1
            told = f"Turn {turn}. The game goes on from its last turn; branch to go on from here."
            return self._show(name, turn=turn, status=told)
        except UserError as error:
            return self._say(str(error), bad=True)

    def on_save(self, name: str) -> list[Any]:
        try:
            return [self.pack(name), view.status("The download begins.")]
        except UserError as error:
            return [gr.skip(), view.status(str(error), bad=True)]

    def on_upload(self, path: str) -> list[Any]:
        try:
            name = self.shelf.load(Path(path))
            return self._show(name, status="The game is loaded: go on.")
        except UserError as error:
            return self._say(f"This file cannot be played: {error}", bad=True)

    # What page and API share.

    def _existing(self, name: str) -> Game:
        if not name:
            raise UserError("no game yet: play a turn first")
        return self.shelf.get(name)

    def new_game(self, seed: float, window: float, steps: float) -> str:
        """The id of a new game; numbers come as browsers send them."""
        self.engine.check_settings(seed=seed, window=window, steps=steps)
        return self.shelf.new(seed=int(seed), window=int(window), steps=int(steps))

    def undo_turn(self, name: str) -> None:
        """Forgets the last turn."""
        game = self._existing(name)
        if self.engine.ticket_of(name) is not None:
            raise UserError("a turn is being played: stop it first")
        if not game.turns:
            raise UserError("no turn to undo")
        try:
            game.undo()
        except OSError as error:
            raise UserError(f"the game could not be saved: {error.strerror}") from error

    def pack(self, name: str) -> str:
        """A file with the game, where the browser may fetch it."""
        game = self._existing(name)
        path = game.folder / "animegamer.zip"
        try:
            pack_game(game, path)
            return self.file(path)
        except OSError as error:
            raise UserError(f"the game could not be packed: {error.strerror}") from error
        finally:
            path.unlink(missing_ok=True)

    def _play(
        self,
        name: str,
        line: str,
        level: int,
        seed: float,
        window: int,
        steps: int,
        *,
        emptied: int = 0,
    ) -> Iterator[list[Any]]:
        """A turn; `emptied` more outputs are emptied once it is begun, not where it is refused."""
        kept = [gr.skip()] * emptied
        try:
            if not name:
                name = self.new_game(seed, window, steps)
            ticket = self.engine.submit(
                name, line or "", window=int(window), steps=int(steps), level=int(level or 0)
            )
        except UserError as error:
            yield [name, *self._refuse(name, error)[1:], *kept]
            return
        yield [name, *self._say("")[1:], *[""] * emptied]
        for shown in self._follow(ticket):
            yield [*shown, *kept]

    def _follow(self, ticket: Ticket) -> Iterator[list[Any]]:
        """Tells how far a turn is until it has ended, then shows it."""
        told = None
        while not ticket.wait(_LOOK_EVERY):
            line = view.progress(ticket, self.engine.place(ticket))
            if line != told:
                told = line
                yield [*[gr.skip()] * (len(self._outputs()) - 1), line]
        if ticket.status == "done":
            yield self._show(ticket.game)
        elif ticket.status == "stopped":
            yield self._say("Stopped: the game is as it was before this turn.")
        else:
            yield self._say(ticket.error, bad=True)


class Api:
    """The same for programs: named end points, called with `gradio_client` or over HTTP."""

    def __init__(self, page: Page):
        self.page, self.engine, self.shelf = page, page.engine, page.shelf

    def add(self) -> None:
        """Declares the end points within the page that is being built."""
        for function in (
            self.new_game, self.play_turn, self.try_again, self.progress, self.stop, self.undo,
            self.branch, self.show,
        ):  # fmt: skip
            gr.api(_told(function), api_name=function.__name__, concurrency_limit=None)
        # Files go through components, which fetch, check and send them.
        name = gr.Textbox(visible=False, label="game")
        turn = gr.Number(visible=False, precision=0, label="turn")
        sent = gr.File(visible=False, label="archive")
        got, answer = gr.File(visible=False), gr.JSON(visible=False)
        press = gr.Button(visible=False)
        press.click(_told(self.clip), [name, turn], got, api_name="clip", concurrency_limit=None)
        press.click(_told(self.download), [name], got, api_name="download", concurrency_limit=None)
        press.click(_told(self.load), [sent], answer, api_name="load", concurrency_limit=None)

    def new_game(self, seed: int = 0, window: int = 0, steps: int = 0) -> dict:
        """Starts a game. Window and steps: 0 for the server's own. Returns its state (`show`)."""
        page = self.page
        name = page.new_game(seed, window or self.engine.player.window, steps or page.steps)
        return self.show(name)

    def play_turn(self, game: str, instruction: str, level: int = 0) -> dict:
        """Plays a turn and waits for it. `level`: motion level, 0 for the model's. Returns it."""
        return self._wait(self.engine.submit(game, instruction, level=level))

    def try_again(self, game: str, seed: int, level: int = 0) -> dict:
        """Plays the last turn once more from another seed, and waits. Returns the new one."""
        found = self.shelf.get(game)
        if not found.turns:
            raise UserError("no turn to try again: play one first")
        said, after = found.turns[-1].instruction, len(found.turns) - 1
        return self._wait(self.engine.submit(game, said, after=after, seed=seed, level=level))

    def _wait(self, ticket: Ticket) -> dict:
        ticket.wait()
        if ticket.turn is None:
            raise UserError(ticket.error or "stopped")
        return dataclasses.asdict(ticket.turn)

    def progress(self, game: str) -> dict:
        """How far a game's turn is: status, place in the queue, stage, step, seconds left."""
        self.shelf.get(game)
        ticket = self.engine.ticket_of(game)
        if ticket is None:
            return {"status": "idle"}
        return {
            "status": ticket.status,
            "place": self.engine.place(ticket),
            "stage": ticket.stage,
            "step": ticket.step,
            "steps": ticket.num_steps,
            "seconds_left": ticket.seconds_left,
        }

    def stop(self, game: str) -> bool:
        """Ends the turn that is waiting or being played; whether there was one."""
        self.shelf.get(game)
        return self.engine.stop(game)

    def undo(self, game: str) -> dict:
        """Forgets the last turn. Returns the game's state."""
        self.page.undo_turn(game)
        return self.show(game)

    def branch(self, game: str, turns: int) -> dict:
        """Another game that begins with the first turns of this one. Returns its state."""
        return self.show(self.shelf.branch(game, turns))

    def show(self, game: str) -> dict:
        """A game's id, settings, meters and turns, as `game.json` has them."""
        found = self.shelf.get(game)
        return {
            "game": game,
            "model": found.model,
            "seed": found.seed,
            "window": found.window,
            "steps": found.steps,
            "meters": dataclasses.asdict(found.meters),
            "turns": [dataclasses.asdict(turn) for turn in found.turns],
        }

    def clip(self, game: str, turn: int) -> str:
        """A turn's clip, an MP4."""
        found = self.shelf.get(game)
        if not 1 <= turn <= len(found.turns):
            raise UserError(f"turn {turn}: expected 1 to {len(found.turns)}")
        return self.page.file(found.folder / found.turns[turn - 1].clip)

    def download(self, game: str) -> str:
        """The game as a zip: clips, their film, `game.json`, storyboard."""
        return self.page.pack(game)

    def load(self, archive: str | None) -> dict:
        """A downloaded game, to go on with. Returns its state."""
        if not archive:
            raise UserError("expected a downloaded game, found no file")
        return self.show(self.shelf.load(Path(archive)))


def _told(function: Any) -> Any:
    """The function, whose `UserError`s reach the client as one line."""

    @functools.wraps(function)
    def told(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except UserError as error:
            raise gr.Error(str(error), print_exception=False) from error

    return told
