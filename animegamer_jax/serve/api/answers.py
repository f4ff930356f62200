"""Makes the API's answers from games, turns and requests."""

import base64
import dataclasses

from animegamer_jax.errors import UserError
from animegamer_jax.game.rules import scenes_of
from animegamer_jax.game.saved.game_file import GAME_FILE
from animegamer_jax.game.saved.turns import Turn
from animegamer_jax.game.saved_game import Game
from animegamer_jax.game.scene_words import Reading, read_scene
from animegamer_jax.game.suggestions import suggest
from animegamer_jax.serve.api import models
from animegamer_jax.serve.api.actions import Actions, head_of, id_of
from animegamer_jax.serve.engine.turn_request import TurnRequest

PREFIX = "/api/v1"
INTERNAL_ERROR = "an internal error: the server's log has it; try again"
POINTS = 5  # of a meter, for a change of one


def game_state(actions: Actions, name: str, game: Game, *, note: str = "") -> models.GameModel:
    """Returns the state of a game."""
    start = game.picture.instruction if game.picture else ""
    words, turns = actions.vocabulary, list(game.turns)
    scenes = scenes_of(turns, words, start=start)
    scene = scenes[-1] if scenes else read_scene(start, words)
    picture = None
    if game.picture is not None:
        address = f"{PREFIX}/games/{name}/pictures/start.png"
        picture = models.PictureModel(instruction=start, picture=address)
    redo, day = game.next_turn(), actions.day(game)
    before = ["", *(id_of(turn) for turn in turns)]
    others = [
        turn_state(actions, name, other.turn, after=other.after.removesuffix(".mp4"))
        for other in game.others
    ]
    meters = game.meters
    return models.GameModel(
        game=name,
        model=game.model,
        seed=game.seed,
        window=game.window,
        steps=game.steps,
        rules=game.rules,
        head=head_of(game),
        picture=picture,
        meters=models.MetersModel(**dataclasses.asdict(meters)),
        scene=models.SceneModel(
            **{part: getattr(scene, part) for part in models.SceneModel.model_fields}
        ),
        turns=[
            turn_state(actions, name, turn, after=after)
            for turn, after in zip(turns, before, strict=False)
        ],
        others=others,
        redo=id_of(redo) if redo else None,
        day=None if day is None else _day(day),
        suggestions=[
            models.SuggestionModel(**dataclasses.asdict(suggestion))
            for suggestion in suggest(turns, words, meters=meters, start=start)
        ],
        note=note,
    )


def _day(day: object) -> models.DayModel:
    found = dataclasses.asdict(day)  # type: ignore[call-overload]
    goal = found.pop("goal")
    met = goal["reached"] >= goal["target"]
    return models.DayModel(goal=models.GoalModel(met=met, **goal), **found)


def turn_state(actions: Actions, name: str, turn: Turn, *, after: str) -> models.TurnModel:
    """Returns a turn of a game."""
    address, number = f"{PREFIX}/games/{name}", id_of(turn)
    edit = turn.edit
    return models.TurnModel(
        id=number,
        after=after,
        turn=turn.turn,
        instruction=turn.instruction,
        motion_level=turn.motion_level,
        chosen_level=turn.chosen_level,
        changes=models.ChangesModel(**{k: POINTS * v for k, v in turn.changes.items()}),
        meters=models.MetersModel(**dataclasses.asdict(turn.meters)),
        set_meters=models.MetersModel(**dataclasses.asdict(edit.meters)) if edit else None,
        new_day=edit is not None and edit.new_day,
        seed=turn.seed,
        window=turn.window,
        steps=turn.steps,
        seconds=turn.seconds["total"],
        unknown=list(actions.engine.player.tokenizer.unknown_words(turn.instruction)),
        clip=f"{address}/clips/{number}.mp4",
        picture=f"{address}/pictures/{number}.webp",
    )


def summary(name: str, game: Game) -> models.SummaryModel:
    """Returns a game for a list."""
    address = f"{PREFIX}/games/{name}/pictures"
    last = game.turns[-1] if game.turns else None
    picture = f"{address}/{id_of(last)}.webp" if last else None
    if picture is None and game.picture is not None:
        picture = f"{address}/start.png"
    title = last.instruction if last else game.picture.instruction if game.picture else ""
    return models.SummaryModel(
        game=name,
        turns=len(game.turns),
        takes=len(game.all_turns),
        title=title,
        picture=picture,
        changed=(game.folder / GAME_FILE).stat().st_mtime,
    )


def progress(actions: Actions, request: TurnRequest | None) -> models.ProgressModel:
    """Returns the progress of a turn."""
    if request is None:
        return models.ProgressModel(status="idle")
    return models.ProgressModel(
        status=request.status,
        instruction=request.instruction,
        queue_position=actions.engine.queue_position(request),
        stage=request.stage,
        step=request.step,
        steps=request.num_steps,
        seconds_left=request.seconds_left,
        error=request.error,
    )


def first_picture(request: TurnRequest | None) -> models.FirstPictureModel | None:
    """Returns the first picture of a turn that is being played, if there is one."""
    if request is None or request.ended or request.first_picture is None:
        return None
    found = request.first_picture
    return models.FirstPictureModel(
        turn=request.after + 1,
        instruction=request.instruction,
        step=found.step,
        steps=found.steps,
        picture=f"data:image/jpeg;base64,{base64.b64encode(found.jpeg).decode()}",
    )


def reading(actions: Actions, text: str) -> models.ReadingModel:
    """Returns what the model understands of a line, and why it cannot be played."""
    error = ""
    if text.strip():
        try:
            actions.engine.check_instruction(text.strip())
        except UserError as found:
            return models.ReadingModel(understood=True, unknown=[], error=str(found))
    return reading_of(actions.read(text), error=error)


def reading_of(found: Reading, *, error: str = "") -> models.ReadingModel:
    """Returns a line's reading as the API answers it."""
    return models.ReadingModel(
        understood=found.understood,
        unknown=[
            models.UnknownWordModel(
                word=unknown.word, start=unknown.start, end=unknown.end, near=list(unknown.near)
            )
            for unknown in found.unknown
        ],
        error=error,
    )
