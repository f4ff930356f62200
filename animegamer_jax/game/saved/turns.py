"""What `game.json` holds: turns, the changes of meters that they bring, and what players set.

A turn is an instruction and the game state that answers it (paper, section 3): an animation
shot and the changes of the character's stamina, social and entertainment.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple

import numpy as np
from annotated_types import Ge, Interval
from jaxtyping import Float32, Int32, UInt8

METERS = ("stamina", "social", "entertainment")
METER_STEP = 5  # points of a meter for a change of one, as in the released demo

History = Literal["predicted", "shown"]
"""Shot representations of past turns, as `Protocol.history`."""

Rules = Literal["off", "day"]
"""Whether a game is played by the rules of `game.rules`."""

Seed = Annotated[int, Interval(ge=0, le=2**63 - 1)]
Setting = Annotated[int, Interval(ge=1, le=1000)]  # memory and time grow with them
_Percent = Annotated[int, Interval(ge=0, le=100)]
_Change = Annotated[int, Interval(ge=-5, le=5)]  # the range of the vocabulary's state tokens
_Count = Annotated[int, Ge(1)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Meters:
    """The character's meters, from 0 to 100; they start at 50, as in the released demo."""

    stamina: _Percent = 50
    social: _Percent = 50
    entertainment: _Percent = 50

    def after(self, *, stamina: int, social: int, entertainment: int) -> "Meters":
        """Returns the meters after a turn's changes of five points each, within 0 and 100."""
        changes = {"stamina": stamina, "social": social, "entertainment": entertainment}
        return Meters(
            **{
                name: min(100, max(0, getattr(self, name) + METER_STEP * change))
                for name, change in changes.items()
            }
        )


class TurnRecord(NamedTuple):
    """What the networks need of a past turn.

    `states` are the motion level and the changes of social, entertainment and stamina;
    `first_latents` are the latents of the first frame, if the decoder has a memory.
    """

    instruction: str
    representation: Float32[np.ndarray, "n d"]
    states: Int32[np.ndarray, "4"]
    first_latents: Float32[np.ndarray, "h w c"] | None = None


class NewTurn(NamedTuple):
    """A turn as it was played, not saved yet: fields as in `TurnRecord`, and how long it took."""

    states: Int32[np.ndarray, "4"]
    motion_value: float
    representation: Float32[np.ndarray, "n d"]
    frames: UInt8[np.ndarray, "f y x 3"]
    seconds: Mapping[str, float]
    first_latents: Float32[np.ndarray, "h w c"] | None = None


class NewPicture(NamedTuple):
    """A player's own picture as a turn, not saved yet: fields as in `TurnRecord`, and its pixels.

    It stands in the window as the turn before the first.
    """

    instruction: str
    representation: Float32[np.ndarray, "n d"]
    states: Int32[np.ndarray, "4"]
    pixels: UInt8[np.ndarray, "y x 3"]
    first_latents: Float32[np.ndarray, "h w c"] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PictureTurn:
    """The turn of a player's own picture, as in `game.json`; it does not change the meters.

    Attributes:
        instruction: The picture's text.
        motion_level: Motion level that the model sees, 1 to 5.
        social: Change that the model sees.
        entertainment: Change that the model sees.
        stamina: Change that the model sees.
    """

    instruction: str
    motion_level: Annotated[int, Interval(ge=1, le=5)]
    social: _Change
    entertainment: _Change
    stamina: _Change

    @property
    def representation_file(self) -> str:
        """Name of the file with the shot representation."""
        return "picture.npz"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Edit:
    """What a player set after a turn, before the next one.

    Attributes:
        meters: Meters with which the next turn begins.
        social, entertainment, stamina: Changes of this turn as the window then holds them.
        new_day: Whether a new day begins.
    """

    meters: Meters
    social: _Change
    entertainment: _Change
    stamina: _Change
    new_day: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn, as in `game.json`.

    Attributes:
        turn: Number of the turn, from 1.
        instruction: The player's instruction.
        motion_level: Motion level, 1 to 5.
        motion_value: Motion value that the decoder received.
        social, entertainment, stamina: Changes of the meters.
        meters: Meters after this turn.
        clip: Name of a file in the game's folder.
        seconds: Duration: "total", and "mllm", "decoder", "vae" if they were separate programs.
        seed: Seed of this turn.
        window: Window of this turn.
        steps: Denoising steps of this turn.
        chosen_level: Whether the player set the motion level.
        edit: What the player set after this turn; None for nothing.
    """

    turn: _Count
    instruction: str
    motion_level: Annotated[int, Interval(ge=1, le=5)]
    motion_value: Annotated[float, Ge(0)]
    social: _Change
    entertainment: _Change
    stamina: _Change
    meters: Meters
    clip: str
    seconds: Mapping[str, Annotated[float, Ge(0)]]
    seed: Seed
    window: Setting
    steps: Setting
    chosen_level: bool = False
    edit: Edit | None = dataclasses.field(default=None, metadata={"omit_default": True})

    @property
    def representation_file(self) -> str:
        """Name of the file with the shot representation."""
        return self.clip.removesuffix(".mp4") + ".npz"

    @property
    def next_meters(self) -> Meters:
        """Meters with which the next turn begins: those that the player set, if any."""
        return self.edit.meters if self.edit else self.meters

    @property
    def changes(self) -> dict[str, int]:
        """Changes of the meters by name."""
        return {name: getattr(self, name) for name in METERS}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SetAside:
    """A turn that is not in the game's current line, kept with its files.

    Attributes:
        after: Clip of the turn before it; "" for a first turn.
        turn: The turn.
    """

    after: str
    turn: Turn


def window_states(turn: PictureTurn | Turn) -> Int32[np.ndarray, "4"]:
    """Returns the states of a past turn as the window holds them, with a player's own in them."""
    seen = turn.edit if isinstance(turn, Turn) and turn.edit else turn
    return np.array([turn.motion_level, seen.social, seen.entertainment, seen.stamina], np.int32)
