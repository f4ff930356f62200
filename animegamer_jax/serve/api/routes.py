"""The API over HTTP, version 1: JSON in and out, a turn and a game as server-sent events, files."""

import contextlib
import functools
import logging
import re
import secrets
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile

from animegamer_jax.errors import UserError
from animegamer_jax.game.saved.card import Language, save_card
from animegamer_jax.game.saved.film import film_gif, film_mp4
from animegamer_jax.game.saved.game_file import PICTURE_FILE
from animegamer_jax.game.saved.turns import Meters, Turn
from animegamer_jax.game.saved_game import Game
from animegamer_jax.serve.api import answers, models
from animegamer_jax.serve.api.actions import Actions, ConflictError, UnknownLineError, id_of
from animegamer_jax.serve.api.info import Info
from animegamer_jax.serve.api.streams import (
    HEARTBEAT_SECONDS,
    STREAM,
    game_events,
    stream,
    turn_events,
)
from animegamer_jax.serve.engine.turn_request import TurnRequest
from animegamer_jax.serve.games.game_store import NoGameError
from animegamer_jax.serve.games.pictures import thumbnail

_FOREVER = {"cache-control": "private, max-age=31536000, immutable"}
_MOST_LISTED = 100
_EVENTS = {"schema": {"$ref": f"#/components/schemas/{models.EventsModel.__name__}"}}
_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": models.ErrorModel} for status in (401, 409, 422)
}
_STREAMED = _REFUSALS | {200: {"content": {STREAM: _EVENTS}}}


class LoginError(Exception):
    """The request comes from nobody who may play."""


def _client(request: Request) -> str:
    return request.app.state.client_of(request)


Client = Annotated[str, Depends(_client)]
"""The client who asks: `app.state.client_of` returns it, or raises `LoginError`."""

Reply = Annotated[
    Literal["turn", "events", "accepted"],
    Query(description="wait for the turn, follow it as server-sent events, or go at once"),
]


def add_api(app: FastAPI, actions: Actions, info: Info) -> None:
    """Adds the API to an application, whose `state.client_of` returns the client of a request.

    Args:
        app: The application.
        actions: What clients can do.
        info: What is played.
    """
    router = APIRouter(prefix=answers.PREFIX)

    @router.get("/server")
    def server(who: Client) -> models.ServerModel:
        """Returns what is played here, and whether turns are played yet."""
        return info.server()

    @router.post("/read")
    def read(who: Client, line: models.Line) -> models.ReadingModel:
        """Returns which words of a line the model does not know, and known ones to offer."""
        return answers.reading(actions, line.text)

    _add_games(router, actions)
    _add_turns(router, actions)
    _add_files(router, actions)
    _add_openings(router, info)
    app.include_router(router)
    _add_errors(app, actions)


def _state(actions: Actions, name: str, who: str, *, note: str = "") -> models.GameModel:
    return answers.game_state(actions, name, actions.find(name, client=who), note=note)


def _add_games(router: APIRouter, actions: Actions) -> None:
    @router.post("/games", status_code=201, responses=_REFUSALS)
    def new_game(who: Client, wanted: models.NewGame) -> models.GameModel:
        """Starts a game, from a prepared first shot if one is named."""
        if wanted.character or wanted.place:
            name = actions.new_game_from_opening(
                wanted.character, wanted.place, client=who, seed=wanted.seed, rules=wanted.rules
            )
        else:
            name = actions.new_game(
                client=who,
                seed=wanted.seed,
                window=wanted.window,
                steps=wanted.steps,
                rules=wanted.rules,
            )
        return _state(actions, name, who)

    @router.get("/games", responses=_REFUSALS)
    def list_games(
        who: Client,
        ids: Annotated[str, Query(description="ids with commas between them")] = "",
    ) -> list[models.SummaryModel]:
        """Lists those of some games that exist here; nobody else's can be listed."""
        found = []
        for name in [text for text in ids.split(",") if text][:_MOST_LISTED]:
            with contextlib.suppress(UserError):
                found.append(answers.summary(name, actions.store.peek(name)))
        return found

    @router.post(
        "/games/picture", status_code=201, responses=_REFUSALS, openapi_extra=_form_of(_PICTURE)
    )
    async def new_from_picture(who: Client, request: Request) -> models.GameModel:
        """Starts a game from the player's own picture: an image, or a video's first frame."""

        def begin(path: Path, name: str) -> models.GameModel:
            new, note = actions.new_game_from_picture(
                path, sent.text, client=who, name=name, seed=sent.seed, rules=sent.rules
            )
            return _state(actions, new, who, note=note)

        async with request.form(max_files=1, max_fields=4) as form:
            given = {name: form.get(name) for name in models.PictureForm.model_fields}
            sent = models.PictureForm.model_validate(
                {name: value for name, value in given.items() if isinstance(value, str) and value}
            )
            return await _receive(form.get("picture"), "a picture", actions.folder, begin)

    @router.post(
        "/games/archive", status_code=201, responses=_REFUSALS, openapi_extra=_form_of(_ARCHIVE)
    )
    async def load_game(who: Client, request: Request) -> models.GameModel:
        """Loads a downloaded game."""

        def load(path: Path, name: str) -> models.GameModel:
            return _state(actions, actions.load_game(path, client=who), who)

        async with request.form(max_files=1, max_fields=4) as form:
            return await _receive(form.get("archive"), "a downloaded game", actions.folder, load)

    @router.get("/games/{game}", responses=_REFUSALS)
    def show(who: Client, game: str) -> models.GameModel:
        """Returns the state of a game."""
        return _state(actions, game, who)

    @router.get(
        "/games/{game}/events",
        response_class=StreamingResponse,
        response_model=models.EventsModel,
        responses=_STREAMED,
    )
    async def events(who: Client, game: str) -> StreamingResponse:
        """Follows a game as server-sent events: `state`, `progress`, `picture`, `closing`."""
        await run_in_threadpool(actions.find, game, client=who)
        return stream(
            game_events(actions, game, state=functools.partial(_state, actions, game, who))
        )

    @router.post("/games/{game}/copy", status_code=201, responses=_REFUSALS)
    def copy(who: Client, game: str, wanted: models.Copy) -> models.GameModel:
        """Copies the first turns of a game to a new game."""
        return _state(actions, actions.copy_game(game, wanted.turns, client=who), who)

    @router.put("/games/{game}/rules", responses=_REFUSALS)
    def set_rules(who: Client, game: str, wanted: models.SetRules) -> models.GameModel:
        """Switches the rules of a game on or off."""
        actions.set_rules(game, wanted.rules, client=who)
        return _state(actions, game, who)

    @router.put("/games/{game}/meters", responses=_REFUSALS)
    def set_meters(who: Client, game: str, wanted: models.SetMeters) -> models.GameModel:
        """Sets the meters with which the next turn begins."""
        meters = Meters(**wanted.meters.model_dump())
        actions.set_meters(game, meters, client=who, head=wanted.head)
        return _state(actions, game, who)

    @router.post("/games/{game}/day", responses=_REFUSALS)
    def next_day(who: Client, game: str, wanted: models.Where) -> models.GameModel:
        """Ends the day and begins the next one."""
        actions.next_day(game, client=who, head=wanted.head)
        return _state(actions, game, who)


def _add_turns(router: APIRouter, actions: Actions) -> None:
    def finished(name: str, who: str, request: TurnRequest) -> models.TurnModel:
        if request.turn is None:
            raise UserError(request.error or "stopped")
        game = actions.find(name, client=who)
        clips = ["", *(turn.clip for turn in game.turns)]
        after = clips[request.turn.turn - 1].removesuffix(".mp4")
        return answers.turn_state(actions, name, request.turn, after=after)

    async def answer_turn(name: str, who: str, request: TurnRequest, reply: str) -> Any:
        if reply == "accepted":
            return JSONResponse(answers.progress(actions, request).model_dump(), 202)
        if reply == "events":
            turn = functools.partial(finished, name, who, request)
            return stream(turn_events(actions, name, request, finished=turn))
        with actions.hub.follow(name) as follower:
            while not request.ended:
                await follower.wait(HEARTBEAT_SECONDS)
        return await run_in_threadpool(finished, name, who, request)

    @router.post("/games/{game}/turns", response_model=models.TurnModel, responses=_STREAMED)
    async def play(who: Client, game: str, wanted: models.NewTurn, reply: Reply = "turn") -> Any:
        """Plays a turn."""
        options = wanted.model_dump(include={"level", "seed", "window", "steps"})
        request = await run_in_threadpool(
            actions.play, game, wanted.instruction, client=who, head=wanted.head,
            anyway=wanted.anyway, **options,
        )  # fmt: skip
        return await answer_turn(game, who, request, reply)

    @router.post("/games/{game}/again", response_model=models.TurnModel, responses=_STREAMED)
    async def again(who: Client, game: str, wanted: models.Again, reply: Reply = "turn") -> Any:
        """Plays the last turn again from another seed; the earlier take is set aside."""
        options = wanted.model_dump(include={"level", "window", "steps"})
        seed = secrets.randbits(31) if wanted.seed is None else wanted.seed
        request = await run_in_threadpool(
            actions.play_again, game, client=who, head=wanted.head, seed=seed, **options
        )
        return await answer_turn(game, who, request, reply)

    @router.get("/games/{game}/progress", responses=_REFUSALS)
    def progress(who: Client, game: str) -> models.ProgressModel:
        """Returns the progress of the turn that waits or is being played."""
        actions.find(game, client=who)
        return answers.progress(actions, actions.engine.request_of(game))

    @router.post("/games/{game}/stop", responses=_REFUSALS)
    def stop(who: Client, game: str) -> bool:
        """Stops the turn that waits or is being played; returns whether there was one."""
        actions.find(game, client=who)
        return actions.engine.stop(game)

    @router.post("/games/{game}/undo", responses=_REFUSALS)
    def undo(who: Client, game: str, wanted: models.Where) -> models.GameModel:
        """Sets the last turn aside."""
        actions.undo(game, client=who, head=wanted.head)
        return _state(actions, game, who)

    @router.post("/games/{game}/redo", responses=_REFUSALS)
    def redo(who: Client, game: str, wanted: models.Where) -> models.GameModel:
        """Brings the turn back that was set aside last."""
        actions.redo(game, client=who, head=wanted.head)
        return _state(actions, game, who)

    @router.post("/games/{game}/go", responses=_REFUSALS)
    def go(who: Client, game: str, wanted: models.GoTo) -> models.GameModel:
        """Makes the turns up to one of them the current line; others are set aside."""
        actions.go_to(game, wanted.turn, client=who, head=wanted.head)
        return _state(actions, game, who)


def _add_files(router: APIRouter, actions: Actions) -> None:
    def turn_of(name: str, who: str, number: str) -> tuple[Game, Turn]:
        game = actions.find(name, client=who)
        found = {id_of(turn): turn for turn in game.all_turns}
        if number not in found:
            raise UserError(f"no turn {number[:40]!r} in this game")
        return game, found[number]

    @router.get("/games/{game}/clips/{turn}.mp4", response_class=FileResponse)
    def clip(who: Client, game: str, turn: str) -> FileResponse:
        """Returns the clip of a turn."""
        found, wanted = turn_of(game, who, turn)
        return _file(found.folder / wanted.clip, "video/mp4", headers=_FOREVER)

    @router.get("/games/{game}/pictures/{turn}.webp", response_class=FileResponse)
    def picture(who: Client, game: str, turn: str) -> FileResponse:
        """Returns a small picture of a turn."""
        with _removed():
            path = thumbnail(*turn_of(game, who, turn))
        return _file(path, "image/webp", headers=_FOREVER)

    @router.get("/games/{game}/pictures/start.png", response_class=FileResponse)
    def own_picture(who: Client, game: str) -> FileResponse:
        """Returns the player's own picture."""
        found = actions.find(game, client=who)
        if found.picture is None:
            raise UserError("the game did not start from a picture")
        return _file(found.folder / PICTURE_FILE, "image/png", headers=_FOREVER)

    @contextlib.contextmanager
    def working_copy(name: str, who: str) -> Iterator[Game]:
        actions.find(name, client=who)
        with actions.file_work.slot(who), actions.store.copy(name, client=who) as copy:
            yield copy

    @router.get("/games/{game}/game.zip", response_class=FileResponse)
    def archive(who: Client, game: str) -> Response:
        """Returns the game as a zip, to keep and to load again."""
        with _made(actions.folder, "animegamer.zip") as path:
            actions.pack(game, path, client=who)
            return _file(path, "application/zip", download="animegamer.zip")

    @router.get("/games/{game}/film.{kind}", response_class=FileResponse)
    def film(
        who: Client, game: str, kind: Literal["mp4", "gif"], captions: bool = True
    ) -> Response:
        """Returns the whole current line as one film with captions."""
        make = film_mp4 if kind == "mp4" else film_gif
        media = "video/mp4" if kind == "mp4" else "image/gif"
        with _made(actions.folder, f"animegamer.{kind}") as path:
            with working_copy(game, who) as found, _removed():
                make(found, path, captions=captions)
            return _file(path, media, download=f"animegamer.{kind}")

    @router.get("/games/{game}/card.png", response_class=FileResponse)
    def card(who: Client, game: str, language: Language = "en") -> Response:
        """Returns the current day as a card to share; without rules, the last turns."""
        with _made(actions.folder, "animegamer-day.png") as path:
            with working_copy(game, who) as found, _removed():
                day = actions.day(found)
                save_card(found, path, day=day, words=actions.vocabulary, language=language)
            return _file(path, "image/png", download="animegamer-day.png")


def _add_openings(router: APIRouter, info: Info) -> None:
    @router.get("/openings/{kind}/{number}.webp", response_class=FileResponse)
    def sheet(who: Client, kind: Literal["portraits", "places"], number: int) -> FileResponse:
        """Returns pictures of first shots side by side."""
        path = info.sheet(kind, number)
        if path is None:
            raise UserError("no such pictures: reload the page")
        return _file(path, "image/webp", headers=_FOREVER)

    @router.get("/openings/clips/{number}.mp4", response_class=FileResponse)
    def opening_clip(who: Client, number: int) -> FileResponse:
        """Returns a prepared first shot."""
        path = info.opening_clip(number)
        if path is None:
            raise UserError("no such first shot: reload the page")
        return _file(path, "video/mp4", headers=_FOREVER)


def _add_errors(app: FastAPI, actions: Actions) -> None:
    """Answers every error in one line."""

    def refuse(status: int, **fields: Any) -> JSONResponse:
        return JSONResponse(models.ErrorModel(**fields).model_dump(), status)

    @app.exception_handler(UserError)
    def refused(request: Request, error: UserError) -> JSONResponse:
        text = actions.hide(error)
        if isinstance(error, ConflictError):
            return refuse(409, code="conflict", error=text)
        if isinstance(error, UnknownLineError):
            reading = answers.reading_of(error.reading)
            return refuse(422, code="unknown words", error=text, reading=reading)
        code = "no game" if isinstance(error, NoGameError) else "refused"
        return refuse(422, code=code, error=text)

    @app.exception_handler(LoginError)
    def not_logged_in(request: Request, error: LoginError) -> JSONResponse:
        return refuse(401, code="login", error="log in first")

    @app.exception_handler(ValidationError)
    @app.exception_handler(RequestValidationError)
    def invalid(request: Request, error: ValidationError | RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        names = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
        field = ".".join(names) or "body"
        return refuse(422, code="refused", error=f"{field}: {first['msg']}"[:300])

    @app.exception_handler(Exception)
    def internal(request: Request, error: Exception) -> JSONResponse:
        logging.getLogger(__name__).error("a request failed", exc_info=error)
        return refuse(500, code="internal", error=answers.INTERNAL_ERROR)


def _file(
    path: Path, media: str, *, headers: dict[str, str] | None = None, download: str | None = None
) -> FileResponse:
    if not path.is_file():
        raise UserError("the game has changed meanwhile: try again")
    return FileResponse(path, media_type=media, headers=headers, filename=download)


@contextlib.contextmanager
def _removed() -> Iterator[None]:
    """Turns what is missing, because a turn was dropped meanwhile, into a UserError."""
    try:
        yield
    except FileNotFoundError as error:
        raise UserError("the game has changed meanwhile: try again") from error


@contextlib.contextmanager
def _made(folder: Path, name: str) -> Iterator[Path]:
    """Yields the path of a file to send, in a new folder that is deleted if it cannot be made.

    The server's sweep of its temporary folder deletes it afterwards.
    """
    temporary = Path(tempfile.mkdtemp(dir=folder))
    try:
        yield temporary / name
    except BaseException:
        for path in temporary.iterdir():
            path.unlink()
        temporary.rmdir()
        raise


_PICTURE = {
    "picture": {"type": "string", "format": "binary"},
    **models.PictureForm.model_json_schema()["properties"],
}
_ARCHIVE = {"archive": {"type": "string", "format": "binary"}}


def _form_of(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the OpenAPI description of a form."""
    schema = {"type": "object", "properties": fields, "required": list(fields)[:2]}
    return {"requestBody": {"content": {"multipart/form-data": {"schema": schema}}}}


async def _receive(
    upload: Any, expected: str, folder: Path, work: Callable[[Path, str], models.GameModel]
) -> models.GameModel:
    """Returns what `work` makes of an upload: of its copy's path, and its name."""
    if not isinstance(upload, UploadFile):
        raise UserError(f"expected {expected}, found no file: choose one")
    name = re.sub(r"[^\w.-]", "_", upload.filename or "file")[-60:]

    def copy_and_work() -> models.GameModel:
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            path = Path(temporary) / f"_{name}"
            with path.open("wb") as file:
                while block := upload.file.read(1 << 20):
                    file.write(block)
            return work(path, name)

    return await run_in_threadpool(copy_and_work)
