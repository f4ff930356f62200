"""`animegamer play`: plays a file of instructions, or a prompt in the terminal, turn by turn."""

import itertools
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import tyro

from animegamer_jax.bundle.embedded import model_folder
from animegamer_jax.configs import Dtype, ModelConfig
from animegamer_jax.devices import keep_compiled_programs
from animegamer_jax.errors import UserError, check_between
from animegamer_jax.game.instructions import (
    Line,
    check_instructions,
    check_picture_text,
    parse_instructions,
    read_instructions,
)
from animegamer_jax.game.saved.game_file import GAME_FILE, PICTURE_FILE, check_no_game
from animegamer_jax.game.saved.turns import History
from animegamer_jax.game.saved_game import Game
from animegamer_jax.game.turn_output import check_turn
from animegamer_jax.media.pictures import Picture, fit_picture, read_picture
from animegamer_jax.play.terminal import TerminalGame
from animegamer_jax.storage.locks import only_writer

_LARGEST_SEED = 2**31 - 1


def play(
    *,
    model: str = "toy",
    instructions: Path | None = None,
    out: Path = Path("out/play"),
    picture: Path | None = None,
    picture_text: str | None = None,
    window: int | None = None,
    steps: int | None = None,
    seed: int | None = None,
    dtype: Dtype | None = None,
    layout: Literal["latency"] | None = None,
    history: History | None = None,
    skip: Path | None = None,
    int8: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    preview: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> int:
    """Play a game: write a clip, a shot representation and an entry in game.json for each turn.

    Args:
        model: Model folder, as `animegamer convert` writes it, or `toy` for the embedded model.
        instructions: UTF-8 file with one instruction a line; blank lines and lines that start
            with # are skipped. Default: a prompt, or standard input if it is not a terminal.
        out: Output folder for the clips, game.json and storyboard.png.
        picture: Picture from which the game starts, or a video, of which the first frame is taken.
            The model sees it as the turn before the first; it needs T5 and CLIP. Default: none.
        picture_text: Who is in the picture, what they do and where, in the form of an instruction.
            Required with --picture. Default: none.
        window: Turns of context, the current one included, 1 to 1000. Default: the model's own.
        steps: Denoising steps a turn, 1 to 1000. Default: the model's own.
        seed: Seed of the game; the same seed gives the same game. Default: 0.
        dtype: Number format of the computation. Default: the model's own.
        layout: Distribution over devices: `latency` plays on eight devices, as one program a turn.
            Default: play on the first device.
        history: Past shots as the model sees them: as it `predicted` them, or as they were `shown`:
            encoded from the first frame of each clip. Default: the model's own.
        skip: File of denoising steps to skip, as `animegamer calibrate` writes it. Default: none.
        int8: Round the language model's weights to eight bits, which halves their memory.
        preview: Write preview.png to the output folder while a turn is being made: the picture that
            the model draws first, or a guess of the first frame after half of the steps, then the
            first frame as it is.
        resume: Continue the game in the output folder after its last finished turn, with the
            window, steps, seed and history that it was started with.
    """
    check_between("--window", window, 1, 1000)
    check_between("--steps", steps, 1, 1000)
    check_between("--seed", seed, 0, _LARGEST_SEED)
    folder = model_folder(model)
    given = _read_picture(picture, picture_text)
    lines = _read_lines(instructions)
    source = str(instructions) if instructions else "standard input"
    with only_writer(out):
        game = None
        if resume and (out / GAME_FILE).exists():
            game = Game.load(out)
            for name, wanted in (("window", window), ("steps", steps), ("seed", seed)):
                _check_same(game, name, wanted, found=getattr(game, name))
            _check_same(game, "history", history, found=game.history_kind)
            window, steps, seed, history = game.window, game.steps, game.seed, game.history_kind
            if lines is not None:
                _check_prefix(game, lines, source)
            if given is not None:
                _check_same_text(game, given.text)
        else:
            check_no_game(out)
        _check_writable(out)
        seed = 0 if seed is None else seed

        # Importing JAX takes a second, so check the options first.
        keep_compiled_programs()
        from animegamer_jax.bundle.bundle import Bundle
        from animegamer_jax.game.pictures import PictureEncoder, check_window, frame_size
        from animegamer_jax.game.player import Player

        bundle = Bundle.open(folder)
        if game is not None:
            _check_same(game, "model", bundle.name, found=game.model)
            _check_same(game, "protocol", bundle.protocol.name, found=game.protocol)
            _check_representations(game, bundle.config)
            if given is not None:
                _check_same_picture(game, given, *frame_size(bundle.config))
        new_picture = None
        if game is None and given is not None:
            check_window(bundle.protocol.window if window is None else window)
            # Before the player's networks are loaded: T5 is larger than all of them and not kept.
            encoder = PictureEncoder(bundle)
            new_picture = encoder.represent(given.picture, given.text, name=given.name)
            del encoder
        vocabulary = bundle.vocabulary
        player = Player.from_bundle(
            bundle,
            window=window,
            steps=steps,
            dtype=dtype,
            layout=layout,
            num_games=1,
            history=history,
            skip=skip,
            int8=int8,
        )
        check_instructions(lines or [], source, check=player.check_instruction)
        if game is None:
            game = player.new_game(out, model=bundle.name, seed=seed, picture=new_picture)
        command = ["animegamer", "play", "--model", model]
        command += ["--instructions", str(instructions)] if instructions else []
        command += ["--out", str(out), "--window", str(game.window), "--steps", str(game.steps)]
        command += ["--seed", str(game.seed), *(["--dtype", dtype] if dtype else [])]
        command += ["--layout", layout] if layout else []
        command += ["--skip", str(skip)] if skip else []
        command += ["--int8"] if int8 else []
        if game.history_kind != bundle.protocol.history:
            command += ["--history", game.history_kind]
        command += ["--resume"]
        resume_command = shlex.join(command)
        if lines is not None and instructions is None:
            resume_command += "  (with the same lines on standard input)"
        note = given.picture.note if given is not None else ""
        return TerminalGame(
            game,
            player,
            vocabulary,
            resume_command=resume_command,
            picture_note=note,
            preview=preview,
        ).play(lines)


class _GivenPicture(NamedTuple):
    """The options of a player's own picture, read and checked."""

    name: str
    picture: Picture
    text: str


def _read_picture(path: Path | None, text: str | None) -> _GivenPicture | None:
    if path is None:
        if text is not None:
            raise UserError("--picture-text: expected --picture with it, found none: give both")
        return None
    # The model was never trained on a turn without words, and an instruction cannot name
    # somebody who has no name.
    if text is None:
        raise UserError(
            f"--picture {path}: expected --picture-text with it, found none: say who is in it, "
            "what they do and where"
        )
    return _GivenPicture(str(path), read_picture(path), check_picture_text(text, name=str(path)))


def _read_lines(path: Path | None) -> list[Line] | None:
    """Reads the file, or standard input if it is not a terminal; None means a prompt."""
    if path is not None:
        return read_instructions(path)
    if sys.stdin is not None and sys.stdin.isatty():
        return None
    data = sys.stdin.buffer.read() if sys.stdin is not None else b""
    lines = parse_instructions(data, "standard input")
    return list(itertools.takewhile(lambda line: line.text.lower() != "quit", lines))


def _check_writable(folder: Path) -> None:
    """Checks before the networks are loaded that the game can be written."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise UserError(f"--out {folder}: expected a folder, found that {nearest} is a file")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"--out {folder}: expected a folder to write to, found {nearest} read-only")


def _check_same(game: Game, name: str, wanted: object, *, found: object) -> None:
    if wanted is not None and wanted != found:
        raise UserError(
            f"{game.folder / GAME_FILE}: {name}: expected {wanted!r}, as given, found {found!r}: "
            "resume the game with that, or choose another folder with --out"
        )


def _check_same_text(game: Game, text: str) -> None:
    found = game.picture.instruction if game.picture else None
    if text != found:
        problem = f"found {_brief(found)}" if found else "found a game without a picture"
        raise UserError(
            f"{game.folder / GAME_FILE}: picture.instruction: expected {_brief(text)}, as given, "
            f"{problem}: resume the game without --picture, or choose another folder with --out"
        )


def _check_same_picture(game: Game, given: _GivenPicture, height: int, width: int) -> None:
    if not game.began_with(fit_picture(given.picture, height=height, width=width)):
        raise UserError(
            f"{game.folder / PICTURE_FILE}: expected the picture {given.name}, as given, found "
            "another one: resume the game without --picture, or choose another folder with --out"
        )


def _check_representations(game: Game, config: ModelConfig) -> None:
    """Rejects a game of a model that has the same name and another size."""
    if config.mllm is None or config.first_dit is None:
        return  # the player refuses the model
    files = reversed(game.representation_files)
    for file, record in zip(files, reversed(game.history()), strict=False):
        check_turn(
            str(game.folder / file),
            record,
            representation=(config.mllm.num_queries, config.mllm.representation_size),
            first_latents=config.first_dit.first_shape,
        )


def _check_prefix(game: Game, lines: list[Line], source: str) -> None:
    """Checks that the turns already played are the first lines of the file."""
    path = game.folder / GAME_FILE
    for turn, line in zip(game.turns, lines, strict=False):
        if turn.instruction != line.text:
            raise UserError(
                f"{path}: turn {turn.turn}: instruction: expected {_brief(line.text)}, as in "
                f"{source}, line {line.number}, found {_brief(turn.instruction)}: give the file "
                "that the game was started with, or choose another folder with --out"
            )
    if len(game.turns) > len(lines):
        raise UserError(
            f"{path}: turns: expected at most {len(lines)}, as in {source}, found "
            f"{len(game.turns)}: give a file with all turns of the game, and the next ones"
        )


def _brief(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
