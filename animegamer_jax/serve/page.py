"""The page, in Gradio: passes input to the engine and shows what it returns."""

import contextlib
import re
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gradio as gr
from gradio import processing_utils

from animegamer_jax.bundle.vocabulary import Vocabulary
from animegamer_jax.errors import UserError
from animegamer_jax.game.instructions import compose_instruction
from animegamer_jax.game.pictures import check_window
from animegamer_jax.game.saved_game import PICTURE_FILE, Game, Meters, NewPicture
from animegamer_jax.media.pictures import read_picture
from animegamer_jax.serve import view
from animegamer_jax.serve.api import Api, Blocks, answering
from animegamer_jax.serve.games.archive import pack_game
from animegamer_jax.serve.engine.engine import Engine, TurnRequest, whole_number
from animegamer_jax.serve.games.game_store import GameStore
from animegamer_jax.serve.guard.limits import FileWork, current_client
from animegamer_jax.storage.paths import user_errors

Number = int | float  # as a browser sends it

_POLL_SECONDS = 0.2  # between two updates of a turn that is being played
_INTRODUCTION = """# AnimeGamer
Say what happens next; leave out what stays as it is."""
# A download button needs its file before the click: set the file, then click again.
_PRESS_SAVE = (
    "() => setTimeout(() => document.querySelector('#save-file a, #save-file').click(), 400)"
)


class Page:
    """The page of an engine.

    Args:
        engine: The engine that plays.
        vocabulary: Words to offer for the parts of an instruction.
        steps: Denoising steps of a new game.
        title: Title of the page.
    """

    def __init__(
        self, engine: Engine, *, vocabulary: Vocabulary, steps: int, title: str = "AnimeGamer"
    ):
        self.engine, self.vocabulary, self.steps, self.title = engine, vocabulary, steps, title
        self.store: GameStore = engine.store
        self.file_work = FileWork()

    def build(self) -> gr.Blocks:
        """Builds the page without launching it."""
        with Blocks(title=self.title, analytics_enabled=False) as blocks:
            self._lay_out()
            self._connect(blocks)
            Api(self).add()
        return blocks

    def _lay_out(self) -> None:
        words = self.vocabulary
        example = next(iter(words.examples), "Qiqi is flying on a broomstick in the day sky.")
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
                            placeholder=example, autofocus=True,
                        )  # fmt: skip
                        self.say = gr.Button("Play", variant="primary", elem_id="play-line")
                    with gr.Tab("In parts"):
                        self.fields = {"character": self._choice("Character", words.characters)}
                        with gr.Row():
                            self.fields["adverb"] = self._choice("Adverb", words.adverbs)
                            self.fields["motion"] = self._choice("Motion", words.motions)
                        with gr.Row():
                            self.fields["time"] = self._choice("Time", words.times)
                            self.fields["place"] = self._choice("Place", words.places)
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
        levels = [("the model decides", 0)]
        levels += [(str(n), n) for n in self.engine.player.protocol.motion_levels]
        with gr.Accordion("Settings", open=False):
            with gr.Row():
                self.level = gr.Dropdown(levels, value=0, label="Motion level", elem_id="level")
                self.seed = gr.Number(
                    0, label="Seed of the game", precision=0, minimum=0, elem_id="seed"
                )
            with gr.Row():
                self.window = gr.Slider(
                    1, self.engine.player.window, value=self.engine.player.window, step=1,
                    label="Window: turns that the model sees", elem_id="window",
                )  # fmt: skip
                self.num_steps = gr.Slider(
                    1, min(max(100, self.steps), self.engine.max_steps), value=self.steps, step=1,
                    label="Denoising steps",
                    elem_id="steps",
                )  # fmt: skip
        with gr.Accordion("Start from your own picture", open=False, visible=self.takes_pictures()):
            gr.Markdown("A picture or a video, whose first frame is taken. The game continues it.")
            with gr.Row():
                self.picture = gr.File(
                    label="Picture", file_types=["image", "video"], file_count="single",
                    height=140, elem_id="picture",
                )  # fmt: skip
                self.picture_text = gr.Textbox(
                    label="Who is in it, what do they do, and where?", lines=2, max_lines=4,
                    elem_id="picture-text", placeholder=example,
                )  # fmt: skip
            self.new_from_picture = gr.Button("New game from the picture", elem_id="new-picture")
        with gr.Row():
            self.new = gr.Button("New game", elem_id="new")
            self.save = gr.Button("Download the game", elem_id="save")
            self.load = gr.UploadButton(
                "Load a game", file_types=[".zip"], file_count="single", elem_id="load"
            )
            self.save_file = gr.DownloadButton("", visible="hidden", elem_id="save-file")
        # What the handlers update, in the order of their results.
        self.outputs: list[Any] = [
            self.game, self.shown, self.clip, self.about, self.meters, self.board, self.status,
        ]  # fmt: skip

    @staticmethod
    def _choice(label: str, words: tuple[str, ...]) -> gr.Dropdown:
        return gr.Dropdown(
            ["", *words], value="", label=label, allow_custom_value=True, min_width=120,
            elem_id=f"field-{label.lower()}",
        )  # fmt: skip

    def _connect(self, blocks: gr.Blocks) -> None:
        out = self.outputs
        settings = [self.level, self.seed, self.window, self.num_steps]

        def on(event: Any, function: Any, inputs: list[Any], outputs: list[Any] | None = None):
            return event(
                answering(function, hide=self.hide), inputs, out if outputs is None else outputs,
                show_progress="hidden", concurrency_limit=None, api_visibility="private",
            )  # fmt: skip

        on(blocks.load, self.on_load, [self.game])
        for event in (self.say.click, self.line.submit):
            on(event, self.on_line, [self.game, self.line, *settings], [*out, self.line])
        on(self.go.click, self.on_fields, [self.game, *self.fields.values(), *settings])
        on(self.again.click, self.on_again, [self.game, *settings])
        on(self.stop.click, self.on_stop, [self.game], [self.status])
        on(self.undo.click, self.on_undo, [self.game])
        on(self.branch.click, self.on_branch, [self.game, self.shown])
        on(self.new.click, self.on_new, [self.seed, self.window, self.num_steps])
        on(
            self.new_from_picture.click,
            self.on_new_from_picture,
            [self.picture, self.picture_text, self.seed, self.window, self.num_steps],
        )
        on(self.board.select, self.on_select, [self.game])
        saved = on(self.save.click, self.on_save, [self.game], [self.save_file, self.status])
        saved.success(None, None, None, js=_PRESS_SAVE, api_visibility="private")
        on(self.load.upload, self.on_upload, [self.load])

    # Updates of the page

    def _show(self, name: str, *, turn: int = 0, status: str = "", bad: bool = False) -> list[Any]:
        """Updates the whole page for a game; `turn` 0 is its last turn."""
        game = self.find(name) if name else None
        turns = game.turns if game else []
        number = turn if 1 <= turn <= len(turns) else len(turns)
        found = turns[number - 1] if number else None
        picture = game.picture.instruction if game and game.picture else ""
        said = found.instruction if found else picture
        unknown = self.engine.player.tokenizer.unknown_words(said) if said else ()
        with _removed():
            pictures = [(view.thumbnail(game, t), f"turn {t.turn}") for t in turns] if game else []
            if game and picture:
                pictures.insert(0, (game.folder / PICTURE_FILE, "picture"))
            clip = self.file(game.folder / found.clip) if game and found else None
            board = [(self.file(path), label) for path, label in pictures]
        return [
            name,
            0 if number == len(turns) else number,
            clip,
            view.describe(found, len(turns), picture=picture, unknown=unknown),
            view.meters(found.meters if found else Meters(), found),
            gr.Gallery(
                board,
                selected_index=number - 1 + bool(picture) if found else None,
            ),
            view.status(status, bad=bad),
        ]

    def file(self, path: Path) -> str:
        """Copies a file to Gradio's cache, so that the browser gets no access to any folder."""
        return processing_utils.save_file_to_cache(path, cache_dir=self.clip.GRADIO_CACHE)

    def hide(self, error: UserError) -> str:
        """Returns an error without the folders of this server."""
        folders = (self.store.folder, self.store.folder.absolute(), self.clip.GRADIO_CACHE)
        text = str(error)
        for folder in sorted(map(str, folders), key=len, reverse=True):
            text = re.sub(rf"{re.escape(folder)}/((\.copy-[^/]+|[0-9a-f]+)/)?", "", text)
        return text

    def find(self, name: str) -> Game:
        """Returns a client's game.

        Raises:
            UserError: there is none, or no place to open it.
        """
        return self.store.get(name, client=current_client())

    def _say(self, text: str, *, bad: bool = False) -> list[Any]:
        """Updates only the status line."""
        return self._set_status(view.status(text, bad=bad))

    def _set_status(self, line: str) -> list[Any]:
        return [*[gr.skip()] * (len(self.outputs) - 1), line]

    def _refuse(self, name: str, error: UserError) -> list[Any]:
        """Shows an error: as a warning while a turn is played, which uses the status line."""
        if name and self.engine.request_of(name) is not None:
            gr.Warning(self.hide(error))
            return [gr.skip()] * len(self.outputs)
        return self._say(self.hide(error), bad=True)

    # Handlers

    def on_load(self, name: str) -> Iterator[list[Any]]:
        """Shows the game that this browser played before, if it still exists."""
        if not name:
            yield self._show("")
            return
        try:
            yield self._show(name, status="Welcome back.")
        except UserError as error:
            yield self._show("", status=self.hide(error), bad=True)
            return
        request = self.engine.request_of(name)
        if request is not None:
            yield from self._follow(request)

    def on_line(self, name: str, line: str, *settings: Number) -> Iterator[list[Any]]:
        """Plays the line and empties it once the turn has begun: later typing is kept."""
        yield from self._play(name, line, settings, emptied=1)

    def on_fields(self, name: str, *inputs: Any) -> Iterator[list[Any]]:
        """Plays the instruction that the fields make; the inputs are theirs and the settings."""
        parts = {part: text or "" for part, text in zip(self.fields, inputs, strict=False)}
        yield from self._play(name, compose_instruction(**parts), inputs[len(parts) :])

    def on_again(self, name: str, *settings: Number) -> Iterator[list[Any]]:
        """Plays the last turn again, from another seed."""
        try:
            request = self.play_again(name, seed=secrets.randbits(31), **_options(settings))
        except UserError as error:
            yield self._refuse(name, error)
        else:
            yield from self._follow(request)

    def on_stop(self, name: str) -> str:
        if name and self.engine.stop(name):
            return view.status("Stopped: the game is unchanged.")
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
            new = self.branch_game(name, turns)
            return self._show(new, status=f"A new game that continues after turn {turns}.")
        except UserError as error:
            return self._refuse(name, error)

    def on_new(self, seed: Number, window: Number, steps: Number) -> list[Any]:
        try:
            name = self.new_game(seed, window, steps)
            return self._show(name, status="A new game.")
        except UserError as error:
            return self._say(self.hide(error), bad=True)

    def on_new_from_picture(
        self, path: str | None, text: str, seed: Number, window: Number, steps: Number
    ) -> list[Any]:
        try:
            name, note = self.new_game_from_picture(path, text, seed, window, steps)
            return self._show(name, status=f"A new game from your picture. {note}".strip())
        except UserError as error:
            return self._say(self.hide(error), bad=True)

    def on_select(self, name: str, event: gr.SelectData) -> list[Any]:
        try:
            game = self._existing(name)
            turn = int(event.index) + (game.picture is None)
            if turn == 0:
                return self._say("Your picture, from which the game starts.")
            text = f"Turn {turn}. The game continues after its last turn; branch to continue here."
            return self._show(name, turn=turn, status=text)
        except UserError as error:
            return self._say(self.hide(error), bad=True)

    def on_save(self, name: str) -> list[Any]:
        try:
            return [self.pack(name), view.status("The download starts.")]
        except UserError as error:
            return [gr.skip(), view.status(self.hide(error), bad=True)]

    def on_upload(self, path: str) -> list[Any]:
        try:
            name = self.load_game(path)
            return self._show(name, status="The game is loaded: play on.")
        except UserError as error:
            return self._say(f"This file cannot be played: {self.hide(error)}", bad=True)

    # Shared with the API

    def _existing(self, name: str) -> Game:
        if not name:
            raise UserError("no game yet: play a turn first")
        return self.find(name)

    def new_game(
        self,
        seed: Number,
        window: Number,
        steps: Number,
        *,
        picture: NewPicture | None = None,
    ) -> str:
        """Creates a game and returns its id; browsers send numbers as floats."""
        self.engine.check_settings(seed=seed, window=window, steps=steps)
        return self.store.new(
            seed=int(seed), window=int(window), steps=int(steps), picture=picture,
            client=current_client(),
        )  # fmt: skip

    def takes_pictures(self) -> bool:
        """Returns whether the model can represent a player's own picture."""
        try:
            self.engine.player.check_pictures()
        except UserError:
            return False
        return True

    def new_game_from_picture(
        self, path: str | None, text: str, seed: Number, window: Number, steps: Number
    ) -> tuple[str, str]:
        """Creates a game from a player's own picture.

        Returns:
            The game's id, and what was left out of the file.

        Raises:
            UserError: the picture, its text or a setting cannot be used.
        """
        player = self.engine.player
        player.check_pictures()
        self.engine.check_settings(seed=seed, window=window, steps=steps)
        check_window(int(window))
        if not path:
            raise UserError("expected a picture, found no file: choose one")
        name = Path(path).name[:60]
        self.engine.check_length(text or "")
        with self.file_work.slot(current_client()):
            picture = read_picture(Path(path), name=name)
            turn = player.represent(picture, text or "", name=name)
        return self.new_game(seed, window, steps, picture=turn), picture.note

    def play_again(self, name: str, **options: int) -> TurnRequest:
        """Queues the last turn again; the options are those of `Engine.submit`."""
        turns = self._existing(name).turns
        if not turns:
            raise UserError("no turn to try again: play one first")
        return self.engine.submit(
            name, turns[-1].instruction, after=len(turns) - 1, client=current_client(), **options
        )

    def undo_turn(self, name: str) -> None:
        """Removes the last turn."""
        self._existing(name)
        with self.store.use(name, client=current_client()) as game:
            if self.engine.request_of(name) is not None:
                raise UserError("a turn is being played: stop it first")
            if not game.turns:
                raise UserError("no turn to undo")
            with user_errors(f"game {name}", "could not be saved", hint="try again"):
                game.undo()

    def branch_game(self, name: str, turns: int) -> str:
        """Copies the first turns of a game to a new game and returns its id."""
        client = current_client()
        with self.file_work.slot(client):
            return self.store.branch(name, turns, client=client)

    def load_game(self, path: str | None) -> str:
        """Unpacks an uploaded game, which is deleted, and returns the game's id."""
        if not path:
            raise UserError("expected a downloaded game, found no file")
        client = current_client()
        with self.file_work.slot(client):
            name = self.store.load(Path(path), client=client)
        Path(path).unlink(missing_ok=True)
        return name

    def pack(self, name: str) -> str:
        """Packs the game and returns a path from which the browser may download it."""
        self._existing(name)
        client = current_client()
        with (
            self.file_work.slot(client),
            self.store.copy(name, client=client) as copy,
            user_errors(f"game {name}", "could not be packed", hint="try again"),
        ):
            path = copy.folder / "animegamer.zip"
            pack_game(copy, path)
            return self.file(path)

    def _play(
        self, name: str, line: str, settings: Sequence[Number], *, emptied: int = 0
    ) -> Iterator[list[Any]]:
        """Plays a turn; once it has begun, `emptied` further outputs become empty."""
        kept = [gr.skip()] * emptied
        try:
            if not name:
                name = self.new_game(*settings[1:])
            request = self.engine.submit(
                name, line or "", client=current_client(), **_options(settings)
            )
        except UserError as error:
            yield [name, *self._refuse(name, error)[1:], *kept]
            return
        yield [name, *self._say("")[1:], *[""] * emptied]
        for updates in self._follow(request):
            yield [*updates, *kept]

    def _follow(self, request: TurnRequest) -> Iterator[list[Any]]:
        """Shows the progress of a turn until it has ended, then the turn."""
        last = None
        while not request.wait(_POLL_SECONDS):
            line = view.progress(request, self.engine.queue_position(request))
            if line != last:
                last = line
                yield self._set_status(line)
        if request.status == "done":
            yield self._show(request.game)
        elif request.status == "stopped":
            yield self._say(request.error or "Stopped: the game is unchanged.")
        else:
            yield self._say(request.error, bad=True)


def _options(settings: Sequence[Number]) -> dict[str, int]:
    """Returns the options of `Engine.submit` for the settings' inputs; the seed is the game's.

    Raises:
        UserError: one is no whole number.
    """
    level, _, window, steps = settings
    options = {"level": level or 0, "window": window, "steps": steps}
    return {name: whole_number(name, value) for name, value in options.items()}


@contextlib.contextmanager
def _removed() -> Iterator[None]:
    """Turns what is missing, because a turn was undone meanwhile, into a UserError."""
    try:
        yield
    except FileNotFoundError as error:
        raise UserError("the game has changed meanwhile: try again") from error
