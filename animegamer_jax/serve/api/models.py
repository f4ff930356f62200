"""What the API answers and accepts: typed, as its OpenAPI description shows it."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from animegamer_jax.serve.engine.engine import MAX_CHARACTERS

_Percent = Annotated[int, Field(ge=0, le=100)]


class Model(BaseModel):
    """A message of the API."""

    model_config = ConfigDict(extra="forbid")


class MetersModel(Model):
    """The character's meters, from 0 to 100."""

    stamina: _Percent
    social: _Percent
    entertainment: _Percent


class ChangesModel(Model):
    """Changes of the meters in a turn, in the meters' points."""

    stamina: int
    social: int
    entertainment: int


class TurnModel(Model):
    """A finished turn."""

    id: str = Field(description="name of the turn in its game, which stays the same")
    after: str = Field(description="id of the turn before it; empty for a first turn")
    turn: int = Field(description="number of the turn, from 1")
    instruction: str
    motion_level: int
    chosen_level: bool = Field(description="whether the player set the motion level")
    changes: ChangesModel
    meters: MetersModel = Field(description="meters after the turn")
    set_meters: MetersModel | None = Field(description="meters that the player set after the turn")
    new_day: bool = Field(description="whether a new day begins after the turn")
    seed: int
    window: int
    steps: int
    seconds: float = Field(description="time that the model took")
    unknown: list[str] = Field(description="words of the instruction that the model does not know")
    clip: str = Field(description="address of the clip, an MP4")
    picture: str = Field(description="address of a small picture of it")


class PictureModel(Model):
    """The player's own picture, from which a game starts."""

    instruction: str
    picture: str = Field(description="address of the picture")


class GoalModel(Model):
    """The goal of a day."""

    kind: Literal["social", "entertainment", "balance", "places", "people", "motions"]
    target: int
    reached: int
    met: bool


class DayModel(Model):
    """The current day of a game that is played by the rules."""

    number: int
    first: int = Field(description="number of the day's first turn")
    played: int
    turns: int
    goal: GoalModel
    ending: Literal["exhausted", "evening"] | None
    stars: int


class SuggestionModel(Model):
    """Something to do next."""

    kind: Literal["rest", "meet", "fun", "place", "motion", "character", "time", "example"]
    words: str
    instruction: str


class SceneModel(Model):
    """Who does what, when and where at the end of a game, as far as its instructions say it."""

    character: str
    motion: str
    partner: str
    time: str
    place: str


class GameModel(Model):
    """The state of a game."""

    game: str = Field(description="the game's id; whoever knows it can play on")
    model: str
    seed: int
    window: int
    steps: int
    rules: Literal["off", "day"]
    head: str = Field(description="id of the last turn; empty before the first")
    picture: PictureModel | None
    meters: MetersModel = Field(description="meters with which the next turn begins")
    scene: SceneModel
    turns: list[TurnModel] = Field(description="turns of the current line")
    others: list[TurnModel] = Field(description="turns that are set aside, the latest last")
    redo: str | None = Field(description="id of the turn that `redo` brings back")
    day: DayModel | None = Field(description="the current day; null without rules")
    suggestions: list[SuggestionModel]
    note: str = Field(default="", description="what was left out of an uploaded file")


class SummaryModel(Model):
    """A game in a list."""

    game: str
    turns: int
    takes: int = Field(description="turns of all lines")
    title: str = Field(description="instruction of the last turn")
    picture: str | None = Field(description="address of a small picture of the last turn")
    changed: float = Field(description="when it changed last, in seconds since 1970")


class ProgressModel(Model):
    """A turn that waits or is being played."""

    status: Literal["idle", "waiting", "playing", "done", "stopped", "failed"]
    instruction: str = ""
    queue_position: int = 0
    stage: str = ""
    step: int = 0
    steps: int = 0
    seconds_left: float | None = None
    error: str = ""


class FirstPictureModel(Model):
    """A first picture of a turn: what the model draws first, or a guess of the first frame."""

    turn: int = Field(description="number of the turn")
    instruction: str
    step: int = Field(description="denoising steps of the clip after which it was made")
    steps: int = Field(description="denoising steps of the turn")
    picture: str = Field(description="data: URL of a small JPEG")


class EventsModel(Model):
    """Server-sent events: the name of each field is an event's type, its value the event's data."""

    state: GameModel = Field(description="of a game: it has changed")
    progress: ProgressModel = Field(description="of a game or a turn: progress of the turn")
    picture: FirstPictureModel = Field(description="of a game or a turn: a first picture of it")
    turn: TurnModel = Field(description="of a turn, its last event: the turn is played")
    error: str = Field(description="of a game, its last event: it can no longer be read")
    closing: str = Field(description="of a game, its last event: the server shuts down")


class OpeningModel(Model):
    """A prepared first shot."""

    character: str
    place: str
    clip: str = Field(description="address of the clip")


class SheetModel(Model):
    """Pictures side by side in one file: the first shot of each name."""

    address: str
    names: list[str]


class WordsModel(Model):
    """The words of the model's world."""

    characters: list[str]
    adverbs: list[str]
    motions: list[str]
    times: list[str]
    places: list[str]
    examples: list[str]


class ServerModel(Model):
    """What the server plays, and whether it does yet."""

    model: str
    protocol: str
    status: Literal["ready", "warming up", "failing", "shutting down"]
    compiled: int = Field(description="largest batch that is compiled; 0 while turns wait")
    width: int
    height: int
    window: int = Field(description="largest window")
    steps: int = Field(description="denoising steps of a new game")
    max_steps: int
    motion_levels: list[int]
    pictures: bool = Field(description="whether a game can start from the player's own picture")
    accounts: bool = Field(description="whether players log in")
    words: WordsModel
    openings: list[OpeningModel]
    portraits: SheetModel | None
    places: dict[str, SheetModel] = Field(description="each character in each place")


class UnknownWordModel(Model):
    """A word that the model does not know."""

    word: str
    start: int
    end: int
    near: list[str] = Field(description="known words to offer for it")


class ReadingModel(Model):
    """What the model understands of a line."""

    understood: bool = Field(description="false if no known word names anything")
    unknown: list[UnknownWordModel]
    error: str = Field(description="why the line cannot be played; empty if it can")


class ErrorModel(Model):
    """Why a request was refused, in one line."""

    code: Literal["refused", "conflict", "no game", "unknown words", "login", "internal"]
    error: str
    reading: ReadingModel | None = None


class NewGame(Model):
    """A game to start; what is missing is the server's own."""

    seed: int | None = Field(default=None, description="seed of the turns; random if missing")
    window: int | None = None
    steps: int | None = None
    rules: Literal["off", "day"] = "off"
    character: str = Field(default="", description="whose prepared first shot begins it")
    place: str = Field(default="", description="the place of that first shot")


class PictureForm(Model):
    """What comes with the picture that a game starts from."""

    text: str = Field(default="", description="who is in it, what they do and where")
    rules: Literal["off", "day"] = "off"
    seed: int | None = Field(default=None, description="seed of the turns; random if missing")


class NewTurn(Model):
    """A turn to play."""

    instruction: str = Field(max_length=20 * MAX_CHARACTERS)
    level: int = Field(default=0, description="motion level; 0 for the model's own")
    seed: int | None = None
    window: int | None = None
    steps: int | None = None
    head: str | None = Field(default=None, description="id of the turn after which it is played")
    anyway: bool = Field(default=True, description="play a line without a known word, too")


class Again(Model):
    """The last turn, to be played again."""

    seed: int | None = Field(default=None, description="seed of the new take; random if missing")
    level: int = 0
    window: int | None = None
    steps: int | None = None
    head: str | None = None


class Where(Model):
    """The state of the game that the client has seen."""

    head: str | None = Field(default=None, description="id of the last turn")


class GoTo(Where):
    """A turn to go to; the empty id stands for the start."""

    turn: str


class Copy(Model):
    """A copy of a game's first turns."""

    turns: int


class SetMeters(Where):
    """Meters for the next turn."""

    meters: MetersModel


class SetRules(Model):
    """Rules of a game."""

    rules: Literal["off", "day"]


class Line(Model):
    """A line to read."""

    text: str = Field(max_length=20 * MAX_CHARACTERS)
