"""A player for tests of the server that needs no networks and no JAX program.

As a program, `fake_player.py GAMES STEPS [SECONDS [PORT]] [--warm-up]`, it serves a page on a port,
a free one by default. Turns stay in a step from SIGUSR2 to SIGUSR1; without the seconds of a step
they do so from the start, and so does the warm-up. It ends on SIGTERM, when the turns in play have
ended.
"""

import itertools
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from animegamer_jax.bundle.vocabulary import Vocabulary
from animegamer_jax.errors import NonFiniteError, UserError
from animegamer_jax.game.instructions import check_picture_text
from animegamer_jax.game.openings import Opening, Openings, write_index
from animegamer_jax.game.player import Player
from animegamer_jax.game.saved.turns import NewPicture, NewTurn
from animegamer_jax.game.saved_game import Game
from animegamer_jax.game.turn_output import Preview, TurnOutput
from animegamer_jax.media.pictures import fit_picture
from animegamer_jax.progress import no_progress
from animegamer_jax.serve.games.game_store import GameModel, GameStore

FRAMES, HEIGHT, WIDTH = 5, 16, 24
MODEL = GameModel("tiny", "paper", (6, 8), (240, 360, FRAMES))
WORDS = Vocabulary(
    characters=("Mika", "Ren", "Hana"),
    adverbs=("gently", "wildly"),
    motions=("waving", "running", "sleeping", "talking to Mika", "talking to Ren"),
    times=("day", "night"),
    places=("town", "beach", "forest"),
    examples=("Mika is waving in the town.",),
    effects={"sleeping": {"stamina": 1}, "running": {"stamina": -1, "entertainment": 1}},
)
SECONDS = {"mllm": 0.0, "decoder": 0.0, "vae": 0.0, "total": 0.1}


class FakePlayer(Player):
    """Returns the seed as the picture; while `hold` is clear it stays in a step.

    Its first pictures are 50 levels brighter. After that of the line "stay" it clears `hold`.
    """

    def __init__(self):
        self.window, self.height, self.width = 5, HEIGHT, WIDTH
        self.protocol = SimpleNamespace(
            motion_levels=(1, 2, 3, 4, 5),
            stamina=(-2, -1, 1),
            social=(0, 1),
            entertainment=(0, 1),
            student_timesteps=(),
        )
        self.tokenizer = SimpleNamespace(unknown_words=self._unknown_words)
        self.batches: list[list[str]] = []
        self.calls: list[dict] = []
        self.step_seconds = 0.0
        self.hold = threading.Event()
        self.hold.set()

    @staticmethod
    def _unknown_words(text: str) -> tuple[str, ...]:
        """Words that begin with x are not known."""
        return tuple(word for word in text.split() if word.startswith("x"))

    def check_instruction(self, text: str) -> None:
        if len(text.split()) > 50:
            raise UserError("the instruction has too many tokens")

    def start(self, num_games: int = 1):
        return num_games

    def check_pictures(self) -> None:
        pass

    def represent(self, picture, text, *, name="picture"):
        return NewPicture(
            instruction=check_picture_text(text, name=name),
            representation=np.full((6, 8), 0.5, np.float32),
            states=np.array([1, 0, 0, 1], np.int32),
            pixels=fit_picture(picture, height=HEIGHT, width=WIDTH),
        )

    def restore(self, games):
        return [len(history) for history in games]

    def play_turn(
        self,
        window,
        instructions,
        *,
        seeds,
        turn,
        steps=2,
        levels=None,
        on_progress=no_progress,
        on_frames=None,
        by_chunk=True,
    ):
        self.calls.append({"window": window, "turn": turn, "steps": steps, "seeds": seeds})
        own = len(self.protocol.student_timesteps)
        if own and steps not in (None, own):
            raise UserError(f"{steps} denoising steps: this decoder was distilled to {own}")
        steps = steps or own
        self.batches.append(list(instructions))
        on_progress("mllm", 1, 1)
        for step in range(steps):
            on_progress("decoder", step, steps)
            time.sleep(self.step_seconds)
            while not self.hold.wait(0.01):
                on_progress("decoder", step, steps)
            if on_frames and 2 * (step + 1) in (steps, steps + 1) and step + 1 < steps:
                on_frames(Preview(_pictures(seeds, 1, brighter=50), 0, step + 1, False))
                if "stay" in instructions:
                    self.hold.clear()
        if "bad" in instructions:
            raise NonFiniteError("turn 1: the latents are not finite")
        if "defect" in instructions:
            raise ZeroDivisionError
        count = len(instructions)
        states = np.tile(np.array([3, 1, 0, -1], np.int32), (count, 1))
        states[:, 0] = [level or 3 for level in levels or [0] * count]
        return window, TurnOutput(
            np.stack([np.full((6, 8), seed, np.float32) for seed in seeds]),
            states,
            np.full(count, 8.5),
            _pictures(seeds, FRAMES),
            SECONDS,
        )


def _pictures(seeds: Sequence[int], frames: int, *, brighter: int = 0) -> np.ndarray:
    levels = np.array(seeds) % 200 + brighter
    shape = (len(seeds), frames, HEIGHT, WIDTH, 3)
    return np.broadcast_to(levels[:, None, None, None, None], shape).astype(np.uint8)


def make_openings(folder: Path) -> Openings:
    """A first shot of each character in each place, of one colour."""
    shots = []
    for number, (name, place) in enumerate(itertools.product(WORDS.characters, WORDS.places)):
        shot = Opening(character=name, place=place, game=f"{number:03d}")
        fields = {"model": MODEL.name, "seed": number, "window": 5, "steps": 4}
        game = Game.create(folder / shot.game, protocol=MODEL.protocol, **fields)
        frames = np.full((FRAMES, HEIGHT, WIDTH, 3), 25 * number, np.uint8)
        representation = np.full((6, 8), number, np.float32)
        turn = NewTurn(np.array([2, 1, 0, 1], np.int32), 3.0, representation, frames, SECONDS)
        game.add(turn, f"Character: {name}; Motion: waving; Background: day {place}.")
        shots.append(shot)
    return write_index(folder, shots, fingerprint="fake")


def main(
    games: Path,
    steps: int,
    *,
    held: bool = True,
    step_seconds: float = 0.0,
    port: int = 0,
    warm_up: bool = False,
) -> None:
    """Serves a page, as `animegamer serve` does, with a player that may be held."""
    from animegamer_jax.serve.engine.engine import Engine
    from animegamer_jax.serve.guard.limits import Limits
    from animegamer_jax.serve.guard.monitor import Monitor, show_log
    from animegamer_jax.serve.server import ServerOptions, run

    player, monitor = FakePlayer(), Monitor()
    player.step_seconds = step_seconds
    if held:
        player.hold.clear()
    signal.signal(signal.SIGUSR1, lambda *_: player.hold.set())
    signal.signal(signal.SIGUSR2, lambda *_: player.hold.clear())
    store = GameStore(games, model=MODEL, max_games=64 if step_seconds else 2)
    engine = Engine(
        player, store, batch_sizes=(1, 2, 4), workers=2, max_steps=1000, client_turns=4,
        on_end=monitor.count_turn,
    )  # fmt: skip
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
        port = probe.getsockname()[1]
    options = ServerOptions(
        host="127.0.0.1",
        port=port,
        limits=Limits(client_connections=20, client_upload_mb=1),
        trusted_proxies=("127.0.0.1",),
        shutdown_seconds=20.0,
        warm_up=warm_up,
    )
    show_log()
    with tempfile.TemporaryDirectory() as folder:
        openings = make_openings(Path(folder))
        run(engine, WORDS, monitor, options, name="tiny", steps=steps, openings=openings)


if __name__ == "__main__":
    given = [text for text in sys.argv[1:] if text != "--warm-up"]
    seconds = float(given[2]) if len(given) > 2 else 0.0
    place = int(given[3]) if len(given) > 3 else 0
    main(
        Path(given[0]),
        int(given[1]),
        held=not seconds,
        step_seconds=seconds,
        port=place,
        warm_up="--warm-up" in sys.argv,
    )
