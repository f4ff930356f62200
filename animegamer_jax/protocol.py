"""The game protocol: how turns become tokens, how states are read, and the decoder's conditions.

There are two, `PAPER` and `RELEASED`; a bundle stores the one that its weights were trained for. A
turn, as in the released code:

    <s> { <TURN>instruction<img><frame> f_0..f_225 </frame></img><ML>L</ML><SC>a</SC><ET>b</ET>
          <ST>c</ST></TURN> }  for each turn of the history, oldest first, then for this turn
        <TURN>instruction<img><frame> q_0..q_225 </frame></img><ML>

and in training also the expected answer, `L</ML><SC>a</SC><ET>b</ET><ST>c`.

`Layout` lays this out in arrays of fixed size: every instruction has `caption_length` slots and
every history turn has its slots, whether they are filled or not. Slots without a token are masked,
and positions count only tokens, so the result equals that of the sequence without the gaps.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

STATE_NAMES = ("motion_level", "social", "entertainment", "stamina")
STRENGTHS = range(-5, 6)
SPECIAL_TOKENS = (
    *("<img>", "</img>", "<vid>", "</vid>", "<frame>", "</frame>"),
    *(f"<Strength_{k}>" for k in STRENGTHS),
    "<visual>",
    *("<ML>", "</ML>", "<SC>", "</SC>", "<ET>", "</ET>", "<ST>", "</ST>", "<TURN>", "</TURN>"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Protocol:
    """One way to play; its values belong together.

    Commands override only the window, the history and the number of denoising steps.

    Attributes:
        name: Name of the protocol.
        window: Turns of context, this one included.
        representation_shift: Distance in positions from the queries to the shot representation (the
            release reads the last 226 positions of the sequence, three late).
        states_pass: Pass from whose cache the states are decoded: "same" as that of the
            representation, or a second, "causal" one.
        history_states: States of history turns: their "true" ones, or "zero": `<Strength_0>`.
        turn_end: Tokens that close a history turn.
        caption_length: Maximum number of tokens of an instruction; with 226 frame tokens and 18
            others a turn has 300, a number that occurs in the released data.
        motion_levels, social, entertainment, stamina: Possible values of each state token.
        motion_values: The decoder's motion value for each motion level, in pixels of mean optical
            flow (table of the released decoder script).
        guidance_scale: Guidance scale of the sampler, see `diffusion.Schedule`; 0: no guidance.
        guidance_schedule: Guidance over the sampler's steps: "cosine", as released, or "constant".
        denoising_steps: Denoising steps per turn, unless the player chooses another number.
        history: Shot representations of history turns: as the model "predicted" them, or with the
            image tokens of what was "shown", E_a's of the clip's first frame, or of the picture
            that the clip was made from.
        picture_first: Whether the decoder draws a picture of the prediction, with guidance. The
            clip begins with it, and is made, without guidance, of what E_a sees in it (not in the
            paper).
        motion_guidance: Guidance of such a clip's motion, in the noisier half of its steps: away
            from the clip that has the lowest motion value (not in the paper). It adds to one, as
            the guidance scale does; 0: none.
        student_timesteps: Training steps at which a distilled decoder (a student) denoises, from
            999 down; empty for a decoder that samples with any number of steps.
    """

    name: str
    window: int
    representation_shift: int
    states_pass: Literal["same", "causal"]
    history_states: Literal["true", "zero"]
    turn_end: tuple[str, ...]
    caption_length: int = 56
    motion_levels: tuple[int, ...] = (1, 2, 3, 4, 5)
    social: tuple[int, ...] = (0, 1)
    entertainment: tuple[int, ...] = (0, 1)
    stamina: tuple[int, ...] = (-1, 1)
    motion_values: tuple[float, ...] = (0.5, 2.5, 10.0, 15.0, 40.0)
    guidance_scale: float = 6.0
    guidance_schedule: Literal["cosine", "constant"] = dataclasses.field(
        default="cosine", metadata={"omit_default": True}
    )
    denoising_steps: int = 50
    history: Literal["predicted", "shown"] = dataclasses.field(
        default="predicted", metadata={"omit_default": True}
    )
    picture_first: bool = dataclasses.field(default=False, metadata={"omit_default": True})
    motion_guidance: float = dataclasses.field(default=0.0, metadata={"omit_default": True})
    student_timesteps: tuple[int, ...] = dataclasses.field(
        default=(), metadata={"omit_default": True}
    )

    def __post_init__(self) -> None:
        if self.motion_guidance and not self.picture_first:
            raise ValueError(
                "motion_guidance is of clips that are made of a picture: expected 0, or "
                "picture_first"
            )

    @property
    def state_values(self) -> tuple[tuple[int, ...], ...]:
        """Allowed values of the four states, in the order of `STATE_NAMES`."""
        return (self.motion_levels, self.social, self.entertainment, self.stamina)

    @property
    def guides_clips(self) -> bool:
        """Whether the clip is denoised with guidance; otherwise at most the picture is."""
        return bool(self.guidance_scale) and not self.picture_first

    @property
    def sees_frames(self) -> bool:
        """Whether a turn needs CLIP and E_a, which see a picture or a frame of the clip."""
        return self.history == "shown" or self.picture_first


PAPER = Protocol(
    name="paper",
    window=5,
    representation_shift=0,
    states_pass="same",
    history_states="true",
    turn_end=("</ST>", "</TURN>"),
)
RELEASED = Protocol(
    name="released",
    window=1,
    representation_shift=3,
    states_pass="causal",
    history_states="zero",
    turn_end=("</ST>", "</ST>", "</TURN>"),
)
PROTOCOLS = {protocol.name: protocol for protocol in (PAPER, RELEASED)}


class TokenIds(NamedTuple):
    """Token ids that the layout needs: special tokens by text, and frame tokens in order."""

    bos: int
    special: dict[str, int]
    frames: tuple[int, ...]


class Prompt(NamedTuple):
    """A batch of sequences, one per game; `t` is `Layout.length`."""

    ids: Int[Array, "b t"]
    valid: Bool[Array, "b t"]
    positions: Int[Array, "b t"]


class Layout:
    """Slots of all tokens in the sequence of one turn of the MLLM.

    It holds only numpy arrays, so that a jitted function can close over it. Layouts made from equal
    arguments are equal, so that such a function can be found again.

    Attributes:
        length: Number of slots in the sequence.
        queries: Slots [226] of this turn's frame tokens.
        answers: Slots [4] of this turn's states in a sequence that includes the answer.
        history: Mask [length] of the slots for representations of history turns.
        representation: Slots [226] of the shot representation.
        values, allowed: Possible values of each of the four states, and their token ids; padded
            with -1.
    """

    def __init__(self, protocol: Protocol, ids: TokenIds, *, num_queries: int, window: int):
        if window < 1:
            raise ValueError(f"a window of {window} turns: expected 1 or more")
        if num_queries > len(ids.frames):
            raise ValueError(f"{num_queries} queries, but {len(ids.frames)} frame tokens")
        self.protocol, self.window, self.num_queries = protocol, window, num_queries
        s = ids.special
        self.strength = np.array([s[f"<Strength_{k}>"] for k in STRENGTHS], np.int32)
        frames = list(ids.frames[:num_queries])
        head, body = [s["<TURN>"]], [s["<img>"], s["<frame>"]]
        tail = [s["</frame>"], s["</img>"], s["<ML>"]]
        self.between = np.array(  # the forced tokens after the first, second and third state
            [[s[f"</{a}>"], s[f"<{b}>"]] for a, b in (("ML", "SC"), ("SC", "ET"), ("ET", "ST"))],
            np.int32,
        )
        states = [0, *self.between[0], 0, *self.between[1], 0, *self.between[2], 0]
        self.answer = np.array(states, np.int32)
        state_slots = np.array([0, 3, 6, 9])
        end = [s[token] for token in protocol.turn_end]
        caption = [0] * protocol.caption_length
        turn = head + caption + body + frames + tail
        past = turn + states + end
        template = [ids.bos] + past * (window - 1) + turn
        self.template = np.array(template, np.int32)
        self.length = len(template)
        starts = 1 + len(past) * np.arange(window)
        self.turn_of_slot = np.zeros(self.length, np.int32)  # 0: <s>; 1..window: the turns
        for number, start in enumerate(starts):
            self.turn_of_slot[start : start + len(past)] = number + 1
        self.captions = starts[:, None] + len(head) + np.arange(len(caption))
        first_query = starts + len(head) + len(caption) + len(body)
        query_slots = first_query[:, None] + np.arange(num_queries)
        self.queries = query_slots[-1]
        self.representation = self.queries + protocol.representation_shift
        self.history = np.zeros(self.length, bool)
        self.history[query_slots[:-1].ravel()] = True
        self.states = starts[:-1, None] + len(turn) + state_slots
        self.answers = self.length + state_slots
        most = max(map(len, protocol.state_values))
        self.values = np.zeros((4, most), np.int32)
        self.allowed = np.full((4, most), -1, np.int32)
        for state, values in enumerate(protocol.state_values):
            self.values[state, : len(values)] = values
            self.allowed[state, : len(values)] = [s[f"<Strength_{value}>"] for value in values]
        self._made_of = (protocol, num_queries, window, ids.bos, tuple(s.items()), ids.frames)
        self._hash = hash(self._made_of)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._made_of == other._made_of

    def __hash__(self) -> int:
        return self._hash

    def assemble(
        self,
        captions: Int[Array, "b w c"],
        caption_lengths: Int[Array, "b w"],
        states: Int[Array, "b h 4"],
        num_history: Int[Array, " b"],
    ) -> Prompt:
        """Fills the slots with `w` instructions, the last of this turn, and `h = w - 1` states.

        Of the `h` history turns only the last `num_history` are real.
        """
        b = captions.shape[0]
        ids = jnp.broadcast_to(jnp.asarray(self.template), (b, self.length))
        ids = ids.at[:, self.captions].set(captions)
        shown = states if self.protocol.history_states == "true" else jnp.zeros_like(states)
        ids = ids.at[:, self.states].set(self.state_tokens(shown))
        # Turn w is this one, always real; <s> is turn 0, always real.
        turn = jnp.asarray(self.turn_of_slot)
        oldest = self.window - num_history[:, None]
        valid = (turn[None] >= oldest) | (turn == 0)[None]
        filled = jnp.arange(captions.shape[2])[None, None] < caption_lengths[:, :, None]
        valid = valid.at[:, self.captions].set(valid[:, self.captions] & filled)
        positions = jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1
        return Prompt(ids, valid, jnp.maximum(positions, 0))

    def state_tokens(self, states: Int[Array, "*b 4"]) -> Int[Array, "*b 4"]:
        """Returns the ids of the states' tokens."""
        return jnp.asarray(self.strength)[states - STRENGTHS[0]]

    def append_answer(self, prompt: Prompt, states: Int[Array, "b 4"]) -> Prompt:
        """Appends this turn's states to the prompt, with the forced tokens between them."""
        b, count = states.shape[0], len(self.answer)
        ids = jnp.broadcast_to(jnp.asarray(self.answer), (b, count))
        ids = ids.at[:, self.answers - self.length].set(self.state_tokens(states))
        positions = prompt.positions[:, -1:] + 1 + jnp.arange(count)[None]
        return Prompt(
            jnp.concatenate([prompt.ids, ids], axis=1),
            jnp.concatenate([prompt.valid, jnp.ones((b, count), bool)], axis=1),
            jnp.concatenate([prompt.positions, positions], axis=1),
        )


def inject(
    x: Float[Array, "b t d"], where: Bool[Array, "b t"], values: Float[Array, "b k d"]
) -> Float[Array, "b t d"]:
    """Replaces `x` by `values`, in order, at the (at most `k`) positions where `where` holds."""
    if values.shape[1] == 0:
        return x
    order = jnp.clip(jnp.cumsum(where, axis=1) - 1, 0, values.shape[1] - 1)
    placed = jnp.take_along_axis(values.astype(x.dtype), order[:, :, None], axis=1)
    return jax.lax.select(jnp.broadcast_to(where[:, :, None], x.shape), placed, x)
