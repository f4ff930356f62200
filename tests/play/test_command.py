"""`animegamer play` as a player meets it: files, prompt, mistakes, interruptions, going on."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_games
from PIL import Image

from animegamer_jax import cli
from animegamer_jax.bundle.embedded import ASSETS
from animegamer_jax.game import instructions
from animegamer_jax.game.saved.turns import NewTurn
from animegamer_jax.game.saved_game import Game
from animegamer_jax.media import video
from animegamer_jax.play import terminal

DEMO = ASSETS / "instructions" / "qiqi.txt"
TESTS = Path(__file__).parents[1]


def test_the_demo_has_eight_lines():
    lines = instructions.read_instructions(DEMO)
    assert len(lines) == 8
    assert lines[0].text.startswith("Character: Qiqi; Motion: quickly flying on broomstick;")


def run(capsys, *args: str) -> tuple[int, str, str]:
    status = cli.main(["play", *args])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_mistakes_are_one_line_and_status_two(tmp_path, capsys):
    (tmp_path / "file").write_text("one\n")
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    out, file = str(tmp_path / "out"), str(tmp_path / "file")
    cases = [
        (["--model", "m", "--steps", "0"], "--steps: expected a whole number, 1 to 1000, found 0"),
        (["--model", "m", "--window", "0"], "--window: expected a whole number"),
        (["--model", "m", "--seed", "-1"], "--seed: expected a whole number, 0 to"),
        (
            ["--model", "m", "--instructions", "no.txt"],
            "no.txt: cannot be read: No such file or directory: give a file",
        ),
        (["--model", "m", "--instructions", str(tmp_path)], "cannot be read: Is a directory"),
        (["--model", "m", "--instructions", str(tmp_path / "bad.txt")], "byte 0xff at offset 0"),
        (["--model", "m", "--instructions", file, "--out", file], "found a file"),
        (["--model", "m", "--instructions", file, "--out", f"{file}/in"], "is a file"),
        (["--model", str(tmp_path), "--instructions", file, "--out", out], "not a bundle"),
        (["--model", "gone", "--instructions", file, "--out", out], "gone: not a bundle"),
    ]
    for args, message in cases:
        status, printed, errors = run(capsys, *args)
        assert (status, printed) == (2, ""), args
        assert message in errors
        assert errors.startswith("animegamer play: ")
        assert errors.count("\n") == 1
    assert not Path(out).exists()


def make_saved_game(folder: Path, *instructions: str) -> None:
    game = Game.create(folder, model="tiny", seed=3, window=2, steps=4, protocol="paper")
    for instruction in instructions:
        played = NewTurn(
            states=np.array([3, 1, 0, -1], np.int32),
            motion_value=10.0,
            representation=np.zeros((6, 8), np.float32),
            frames=np.zeros((5, 16, 24, 3), np.uint8),
            seconds={"mllm": 0.0, "decoder": 0.0, "vae": 0.0, "total": 0.0},
        )
        game.add(played, instruction)


def test_another_game_is_not_overwritten_nor_continued(tmp_path, capsys):
    out, file = str(tmp_path / "out"), tmp_path / "file"
    make_saved_game(tmp_path / "out", "one", "two")
    before = (tmp_path / "out" / "game.json").read_bytes()
    file.write_text("one\ntwo\nthree\n")
    base = ["--model", "m", "--instructions", str(file), "--out", out]
    cases = [
        ("one\ntwo\n", [], "found game.json: continue it with --resume"),
        ("one\ntwo\n", ["--resume", "--seed", "4"], "seed: expected 4, as given, found 3"),
        ("one\ntwo\n", ["--resume", "--window", "5"], "window: expected 5, as given, found 2"),
        ("one\ntwo\n", ["--resume", "--steps", "50"], "steps: expected 50, as given, found 4"),
        ("# x\none\n2\n", ["--resume"], "turn 2: instruction: expected '2', as in"),
        ("# x\none\n2\n", ["--resume"], "line 3, found 'two'"),
        ("one\n", ["--resume"], "turns: expected at most 1, as in"),
    ]
    for content, args, message in cases:
        file.write_text(content)
        status, _, errors = run(capsys, *base, *args)
        assert status == 2
        assert message in errors
        assert errors.count("\n") == 1
    assert (tmp_path / "out" / "game.json").read_bytes() == before


def test_a_turn_in_one_line(tmp_path):
    make_saved_game(tmp_path / "game", "one")
    turn = Game.load(tmp_path / "game").turns[0]
    assert terminal.describe(turn, Path("out/play"), total=8) == (
        "turn 1/8  motion 3  stamina 45 (-1)  social 55 (+1)  entertainment 50 (+0)  0.0 s  "
        "out/play/turn_001.mp4"
    )


def test_help_needs_no_model(capsys):
    with pytest.raises(SystemExit) as leaving:
        cli.main(["play", "--help"])
    assert leaving.value.code == 0
    assert "--resume" in capsys.readouterr().out


# From here on with networks: a converted set with random weights, whose pictures are noise.

STEPS = "2"


def game_of(folder: Path) -> dict:
    """Everything a game holds, without what differs from run to run: the seconds."""
    document = json.loads((folder / "game.json").read_text())
    for turn in document["turns"]:
        assert turn.pop("seconds").keys() == {"mllm", "decoder", "vae", "total"}
    return document


def assert_same_game(one: Path, other: Path) -> None:
    assert game_of(one) == game_of(other)
    for turn in Game.load(one).turns:
        np.testing.assert_array_equal(
            video.read_mp4(one / turn.clip), video.read_mp4(other / turn.clip)
        )
        arrays = [np.load(folder / turn.representation_file) for folder in (one, other)]
        np.testing.assert_array_equal(*(pair["representation"] for pair in arrays))
        for pair in arrays:
            pair.close()


@pytest.fixture(scope="module")
def whole(tiny_bundle, tmp_path_factory) -> Path:
    """The eight lines of the demo, played without interruption."""
    out = tmp_path_factory.mktemp("whole") / "game"
    assert cli.main(["play", *options(tiny_bundle, out)]) == 0
    return out


def options(bundle, out: Path, *, instructions: Path | None = DEMO) -> list[str]:
    chosen = ["--instructions", str(instructions)] if instructions else []
    return ["--model", str(bundle), *chosen, "--out", str(out), "--steps", STEPS, "--window", "3"]


def test_eight_turns_from_end_to_end(whole):
    game = Game.load(whole)
    assert [turn.instruction for turn in game.turns] == DEMO.read_text().splitlines()
    names = {f"turn_{n:03d}.{kind}" for n in range(1, 9) for kind in ("mp4", "npz")}
    assert {path.name for path in whole.iterdir()} == names | {"game.json", "storyboard.png"}
    for turn in game.turns:
        assert turn.motion_value > 0
        assert turn.seconds["total"] > 0
        assert video.read_mp4(whole / turn.clip).ndim == 4


def test_stopping_after_turn_three_changes_nothing(whole, tiny_bundle, tmp_path, capsys):
    out, short = tmp_path / "out", tmp_path / "short.txt"
    short.write_text("".join(DEMO.read_text().splitlines(keepends=True)[:3]))
    status, printed, _ = run(capsys, *options(tiny_bundle, out, instructions=short))
    assert status == 0
    assert f"turn 3/3  motion {Game.load(out).turns[2].motion_level}" in printed
    assert f"storyboard  {out / 'storyboard.png'}" in printed
    first = (out / "storyboard.png").read_bytes()
    status, printed, _ = run(capsys, *options(tiny_bundle, out), "--resume")
    assert status == 0
    assert "continuing after turn 3" in printed
    assert "turn 4/8" in printed
    assert "turn 3/8" not in printed
    assert_same_game(whole, out)
    assert (out / "storyboard.png").read_bytes() != first


def test_a_full_disk_in_turn_three(whole, tiny_bundle, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "turn_003.mp4.part").symlink_to("/dev/full")
    status, _, errors = run(capsys, *options(tiny_bundle, out))
    assert status == 2
    assert "turn 3 could not be saved: No space left on device" in errors
    assert "turns 1 to 2 are saved; continue with: animegamer play --model" in errors
    assert len(Game.load(out).turns) == 2
    assert (out / "storyboard.png").exists()
    command = errors.strip().split("continue with: ")[1].split()
    assert command[:2] == ["animegamer", "play"]
    assert cli.main(command[1:]) == 0
    assert_same_game(whole, out)


def start_playing(*args: str) -> subprocess.Popen:
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(TESTS.parent / ".jax_cache")}
    return subprocess.Popen(
        [sys.executable, "-m", "animegamer_jax.cli", "play", *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
    )


def test_ctrl_c_keeps_whole_turns(whole, tiny_bundle, tmp_path):
    out = tmp_path / "out"
    process = start_playing(*options(tiny_bundle, out))
    for line in process.stdout:
        if line.startswith("turn 2/8"):
            process.send_signal(signal.SIGINT)
            break
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    game = Game.load(out)
    number = len(game.turns)
    assert 2 <= number < 8
    assert f"turn {number + 1} was being played; turns 1 to {number} are saved" in errors
    assert (out / "storyboard.png").exists()
    assert not list(out.glob("*.part"))
    assert cli.main(["play", *options(tiny_bundle, out), "--resume"]) == 0
    assert_same_game(whole, out)


def test_numbers_that_are_not_finite(tiny_bundle, tmp_path, capsys):
    from animegamer_jax.bundle.bundle import Bundle, BundleWriter

    bundle, out = Bundle.open(tiny_bundle), tmp_path / "out"
    with BundleWriter(tmp_path / "broken", name="broken", protocol=bundle.protocol) as writer:
        for name in ("mllm", "encoder", "dit", "vae"):
            arrays = {path: bundle.read(name, path) for path in bundle.leaves(name)}
            if name == "dit":
                arrays = {path: np.full_like(array, np.nan) for path, array in arrays.items()}
            writer.write_network(name, getattr(bundle.config, name), list(arrays.items()))
        writer.write_tokenizer(bundle.tokenizer_dir)
    status, _, errors = run(capsys, *options(tmp_path / "broken", out))
    assert status == 2
    assert "turn 1: the latents are not finite after denoising step 1 of 2" in errors
    assert "no turn is saved; continue with: animegamer play" in errors
    assert errors.strip().endswith("--resume")
    assert Game.load(out).turns == []


class Typed(io.TextIOWrapper):
    """Standard input with text in it; `terminal` says whether a person seems to type it."""

    def __init__(self, text: str, *, terminal: bool):
        super().__init__(io.BytesIO(text.encode()))
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.mark.parametrize("ending", ["\n", "quit\n", ""])
def test_a_prompt_on_the_terminal(tiny_bundle, tmp_path, capsys, monkeypatch, ending):
    out = tmp_path / "out"
    monkeypatch.setattr(
        sys, "stdin", Typed(f"Qiqi flies.\n{'word ' * 500}\n{ending}", terminal=True)
    )
    status, printed, errors = run(capsys, *options(tiny_bundle, out, instructions=None))
    assert status == 0, errors
    assert [turn.instruction for turn in Game.load(out).turns] == ["Qiqi flies."]
    assert "turn 1  motion" in printed
    assert str(out / "turn_001.mp4") in printed


def test_lines_of_standard_input(tiny_bundle, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    for lines in ("Qiqi flies.\n", "Qiqi flies.\n\n# no\nQiqi sleeps.\nquit\nNever.\n"):
        monkeypatch.setattr(sys, "stdin", Typed(lines, terminal=False))
        args = options(tiny_bundle, out, instructions=None)
        status, _, errors = run(capsys, *args, *(["--resume"] if out.exists() else []))
        assert status == 0, errors
    assert [turn.instruction for turn in Game.load(out).turns] == ["Qiqi flies.", "Qiqi sleeps."]


def test_words_outside_the_models_world_are_reported(tmp_path, capsys):
    """After their turn, as the player wrote them; a turn of known words has no note."""
    model, file = tiny_games.write_model(tmp_path), tmp_path / "game.txt"
    file.write_text("Mika waves gently.\nMika waves at Totoro & Ren.\n")
    words = ["--instructions", str(file), "--out", str(tmp_path / "out"), "--steps", STEPS]
    status, printed, errors = run(capsys, "--model", str(model.path), *words)
    assert status == 0, errors
    first, second, note, *_ = printed.splitlines()
    assert first.startswith("turn 1/2")
    assert second.startswith("turn 2/2")
    assert note == "  note: the model does not know: 'at', 'Totoro', '&'"
    assert printed.count("note:") == 1


def test_too_long_a_line_is_named_before_anything_is_played(tiny_bundle, tmp_path, capsys):
    out, file = tmp_path / "out", tmp_path / "long.txt"
    file.write_text("Qiqi flies.\n\n" + "word " * 500 + "\n")
    status, printed, errors = run(capsys, *options(tiny_bundle, out, instructions=file))
    assert (status, printed) == (2, "")
    assert f"{file}, line 3: " in errors
    assert not out.exists()


def test_another_model_does_not_go_on(whole, tiny_bundle, tmp_path, capsys):
    import shutil

    out = tmp_path / "out"
    shutil.copytree(whole, out)
    document = json.loads((out / "game.json").read_text())
    (out / "game.json").write_text(json.dumps(document | {"model": "other"}))
    status, _, errors = run(capsys, *options(tiny_bundle, out), "--resume")
    assert status == 2
    assert "model: expected" in errors
    assert "found 'other'" in errors


def test_a_finished_game_resumed_is_left_as_it_is(whole, tiny_bundle, capsys):
    before = (whole / "game.json").read_bytes()
    status, printed, _ = run(capsys, *options(tiny_bundle, whole), "--resume")
    assert status == 0
    assert "turn 8/8" not in printed
    assert (whole / "game.json").read_bytes() == before


# A player's own picture


@pytest.fixture(scope="module")
def seeing(tmp_path_factory) -> Path:
    """A model with CLIP and T5, whose window holds two past turns."""
    networks = ("mllm", "encoder", "dit", "vae", "t5", "clip")
    return tiny_games.write_model(tmp_path_factory.mktemp("seeing"), networks=networks).path


def write_picture(path: Path, seed: int = 0, *, size: tuple[int, int] = (64, 96)) -> Path:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


PICTURE_TEXT = "Mika waves; day."


def picture_options(model: Path, folder: Path, picture: Path, *lines: str) -> list[str]:
    file = folder / f"{len(lines)}.txt"
    file.write_text("".join(f"{line}\n" for line in lines))
    return [
        *("--model", str(model), "--instructions", str(file), "--steps", STEPS),
        *("--picture", str(picture), "--picture-text", PICTURE_TEXT),
    ]


def test_a_game_starts_from_a_picture(seeing, tmp_path, capsys):
    lines = ("mika waves", "ren runs", "mika runs")
    first, other = (write_picture(tmp_path / f"{n}.png", n) for n in (1, 2))
    for name, picture in (("one", first), ("same", first), ("other", other)):
        args = picture_options(seeing, tmp_path, picture, *lines)
        status, printed, errors = run(capsys, *args, "--out", str(tmp_path / name))
        assert status == 0, errors
        assert printed.startswith(f"the game starts from {tmp_path / name / 'picture.png'}\n")
        assert "note:" not in printed
    assert_same_game(tmp_path / "one", tmp_path / "same")
    one, found = Game.load(tmp_path / "one"), Game.load(tmp_path / "other")
    assert one.picture == found.picture
    assert one.picture.instruction == PICTURE_TEXT
    frames = [video.read_mp4(game.folder / game.turns[0].clip) for game in (one, found)]
    assert (frames[0] != frames[1]).mean() > 0.01


def test_a_game_from_a_picture_is_resumed_exactly(seeing, tmp_path, capsys):
    picture = write_picture(tmp_path / "hero.png")
    lines = ("mika waves", "ren runs", "mika runs")
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert (
        run(capsys, *picture_options(seeing, tmp_path, picture, *lines), "--out", str(whole))[0]
        == 0
    )
    for count in (1, 2, 3):  # the same command again, as after an interruption
        args = picture_options(seeing, tmp_path, picture, *lines[:count])
        status, printed, errors = run(capsys, *args, "--out", str(out), "--resume")
        assert status == 0, errors
        assert ("the game starts from" in printed) == (count == 1)
    assert_same_game(whole, out)
    shutil.rmtree(out)
    args = picture_options(seeing, tmp_path, picture, *lines[:1])
    assert run(capsys, *args, "--out", str(out))[0] == 0
    args = picture_options(seeing, tmp_path, picture, *lines)[:6]  # without the picture
    assert run(capsys, *args, "--out", str(out), "--resume")[0] == 0
    assert_same_game(whole, out)


def test_another_picture_does_not_resume_a_game(seeing, tmp_path, capsys):
    picture = write_picture(tmp_path / "hero.png")
    out = ["--out", str(tmp_path / "out"), "--resume"]
    args = picture_options(seeing, tmp_path, picture, "mika waves")
    assert run(capsys, *args, *out)[0] == 0
    before = (tmp_path / "out" / "game.json").read_bytes()
    write_picture(picture, 2)
    status, _, errors = run(capsys, *args, *out)
    assert status == 2
    assert f"picture.png: expected the picture {picture}, as given, found another one" in errors
    status, _, errors = run(capsys, *args, "--picture-text", "ren", *out)
    assert status == 2
    assert "picture.instruction: expected 'ren', as given, found 'Mika waves; day.'" in errors
    plain = ["--out", str(tmp_path / "plain")]
    assert run(capsys, *args[:6], *plain)[0] == 0
    status, _, errors = run(capsys, *args, *plain, "--resume")
    assert status == 2
    assert "found a game without a picture: resume the game without --picture" in errors
    assert (tmp_path / "out" / "game.json").read_bytes() == before


def test_the_first_frame_of_a_clip_and_unknown_words(seeing, tmp_path, capsys):
    clip = tmp_path / "shot.mp4"
    video.write_mp4(clip, np.full((3, 32, 48, 3), 90, np.uint8))
    args = picture_options(seeing, tmp_path, clip, "mika waves")
    text = ["--picture-text", "Hana waves; day."]
    status, printed, errors = run(capsys, *args, *text, "--out", str(tmp_path / "out"))
    assert status == 0, errors
    assert printed.splitlines()[1:3] == [
        f"  note: {clip} is a video: its first frame is used.",
        "  note: the model does not know: 'Hana'",
    ]


def test_pictures_that_cannot_be_used_are_one_line(seeing, tiny_bundle, tmp_path, capsys):
    picture, out = write_picture(tmp_path / "hero.png"), tmp_path / "out"
    small = write_picture(tmp_path / "small.png", size=(8, 8))
    (tmp_path / "text.png").write_text("hero")
    (tmp_path / "lines").write_text("mika waves\n")
    text = ["--picture-text", PICTURE_TEXT]
    cases = [
        (seeing, text, "--picture-text: expected --picture with it"),
        (seeing, ["--picture", str(picture)], f"--picture {picture}: expected --picture-text with"),
        (
            seeing,
            ["--picture", str(picture), "--picture-text", " "],
            "expected a text with the pic",
        ),
        (seeing, ["--picture", str(picture), "--picture-text", "a\x1b"], "a control character"),
        (
            seeing,
            ["--picture", str(picture), "--picture-text", "a " * 9],
            "has 9 tokens, the model",
        ),
        (
            seeing,
            ["--picture", "no.png", *text],
            "no.png: expected a picture .* found no such file",
        ),
        (seeing, ["--picture", str(tmp_path), *text], "found a folder"),
        (seeing, ["--picture", str(small), *text], "at least 16 x 16 pixels, found 8 x 8"),
        (seeing, ["--picture", str(tmp_path / "text.png"), *text], "found neither"),
        (seeing, ["--picture", str(picture), *text, "--window", "1"], "window 1: it holds no past"),
        (tiny_bundle, ["--picture", str(picture), *text], "this bundle lacks clip and t5"),
    ]
    for model, options, message in cases:
        base = ["--model", str(model), "--instructions", str(tmp_path / "lines"), "--steps", STEPS]
        status, printed, errors = run(capsys, *base, "--out", str(out), *options)
        assert (status, printed) == (2, ""), options
        assert re.search(message, errors), errors
        assert errors.count("\n") == 1
    assert not out.exists()
