"""Saved games: the schema, turns and branches, and complete turns whatever happens."""

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
from PIL import Image
from saved_games import SECONDS, add_turn, edit, make_game, make_picture

from animegamer_jax.errors import UserError
from animegamer_jax.game.saved.turns import Meters, SetAside
from animegamer_jax.game.saved_game import Game
from animegamer_jax.game.turn_output import check_turn
from animegamer_jax.media import video


def test_meters_start_at_fifty_and_stay_within_their_range():
    meters = Meters()
    assert meters == Meters(stamina=50, social=50, entertainment=50)
    meters = meters.after(stamina=-1, social=1, entertainment=0)
    assert meters == Meters(stamina=45, social=55, entertainment=50)
    for _ in range(12):
        meters = meters.after(stamina=-1, social=1, entertainment=0)
    assert meters == Meters(stamina=0, social=100, entertainment=50)


def test_the_schema_of_the_file(saved):
    document = json.loads((saved / "game.json").read_text())
    assert set(document) == {
        *("model", "seed", "window", "turns"),
        *("format_version", "steps", "protocol"),
    }
    assert document["turns"][1] == {
        "turn": 2,
        "instruction": "instruction 2",
        "motion_level": 3,
        "motion_value": 10.0,
        "social": 1,
        "entertainment": 0,
        "stamina": -1,
        "meters": {"stamina": 40, "social": 60, "entertainment": 50},
        "clip": "turn_002.mp4",
        "seconds": SECONDS,
        "seed": 0,
        "window": 3,
        "steps": 5,
        "chosen_level": False,
    }
    files = {path.name for path in saved.iterdir()}
    clips = {f"turn_{n:03d}.{kind}" for n in range(1, 5) for kind in ("mp4", "npz")}
    assert files == {"game.json"} | clips


def test_latents_of_first_frames_come_back(tmp_path):
    """Those of a decoder that remembers them: of turns and of the player's own picture."""
    frame = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)
    game = make_game(tmp_path / "game", picture=make_picture()._replace(first_latents=frame))
    add_turn(game, first_latents=frame + 1)
    found = Game.load(tmp_path / "game").history()
    for record, more in zip(found, (0, 1), strict=True):
        np.testing.assert_array_equal(record.first_latents, frame + more)
        sizes = {"representation": (6, 8), "first_latents": (2, 3, 4)}
        check_turn("turn", record, **sizes)
        check_turn("turn", record, **(sizes | {"first_latents": None}))
        with pytest.raises(UserError, match=r"of shape \[2, 3, 5\], .* found \[2, 3, 4\]"):
            check_turn("turn", record, **(sizes | {"first_latents": (2, 3, 5)}))
        with pytest.raises(UserError, match=r"turn: expected latents .* remembers, found none"):
            check_turn("turn", record._replace(first_latents=None), **sizes)
        with pytest.raises(UserError, match=r"turn: expected a shot representation of shape \[6"):
            check_turn("turn", record, **(sizes | {"representation": (6, 9)}))


@pytest.mark.parametrize(
    ("latents", "message"),
    [
        (np.zeros((2, 3), np.float32), "expected a float32 array 'latents' of three axes, found"),
        (np.zeros((2, 3, 4)), "expected a float32 array 'latents' of three axes, found float64"),
        (np.full((2, 3, 4), np.nan, np.float32), "expected finite numbers in 'latents'"),
    ],
)
def test_latents_that_are_none(tmp_path, latents, message):
    game = make_game(tmp_path / "game")
    add_turn(game)
    path = game.folder / game.turns[0].representation_file
    np.savez_compressed(path, representation=np.zeros((6, 8), np.float32), latents=latents)
    with pytest.raises(UserError, match=re.escape(message)):
        Game.load(game.folder)


def test_a_saved_game_comes_back(saved):
    game = Game.load(saved)
    assert (game.model, game.seed, game.window, game.steps) == ("tiny", 0, 3, 5)
    assert [turn.turn for turn in game.turns] == [1, 2, 3, 4]
    assert game.meters == Meters(stamina=30, social=70, entertainment=50)
    history = game.history()
    assert [record.instruction for record in history] == ["instruction 3", "instruction 4"]
    assert history[0].states.tolist() == [3, 1, 0, -1]
    np.testing.assert_array_equal(history[1].representation, np.full((6, 8), 4, np.float32))
    add_turn(game)
    assert len(Game.load(saved).turns) == 5


def test_history_is_what_the_window_holds(tmp_path):
    for window, expected in ((1, 0), (2, 1), (9, 3)):
        game = make_game(tmp_path / str(window), window=window)
        for _ in range(3):
            add_turn(game)
        assert len(game.history()) == expected


def files_of(game: Game) -> set[str]:
    return {path.name for path in game.folder.iterdir()}


def test_an_undone_turn_takes_its_changes_back(saved):
    game = Game.load(saved)
    game.set_aside(3)
    assert game.meters == Meters(stamina=45, social=55, entertainment=50)
    assert len(files_of(game)) == 9
    assert [turn.instruction for turn in Game.load(saved).turns] == ["instruction 1"]
    for turns in (0, 2):
        with pytest.raises(UserError, match="undo: expected 1 to 1 turns"):
            game.set_aside(turns)


def test_a_turn_tried_again_takes_the_place_of_the_old_one(saved):
    game = Game.load(saved)
    old = game.turns[-1]
    add_turn(game, changes=(0, 1, 0), after=3, seed=9, steps=7, window=2, chosen_level=True)
    found = Game.load(saved).turns
    assert len(found) == 4
    assert (found[3].seed, found[3].steps, found[3].window, found[3].chosen_level) == (
        9,
        7,
        2,
        True,
    )
    assert found[3].meters == Meters(stamina=35, social=65, entertainment=55)
    assert found[3].clip == "turn_004_2.mp4"
    assert Game.load(saved).others == [SetAside(after="turn_003.mp4", turn=old)]
    add_turn(game, after=1)
    assert [turn.clip for turn in Game.load(saved).turns] == ["turn_001.mp4", "turn_002_2.mp4"]
    assert len(files_of(game)) == 13  # two of each turn, and game.json


def test_a_branch_is_a_game_of_its_own(saved, tmp_path):
    game = Game.load(saved)
    branch = game.branch(tmp_path / "branch", 2)
    add_turn(branch)
    assert len(Game.load(branch.folder).turns) == 3
    assert len(Game.load(saved).turns) == 4
    assert branch.history()[0].instruction == "instruction 2"
    with pytest.raises(UserError, match="branch: expected 0 to 4 turns, found 5"):
        game.branch(tmp_path / "other", 5)
    with pytest.raises(UserError, match="expected a folder without a game"):
        game.branch(branch.folder, 1)


def test_history_of_a_turn_before(saved):
    game = Game.load(saved)
    reported = [record.instruction for record in game.history(before=3, window=9)]
    assert reported == ["instruction 1", "instruction 2"]
    assert game.history(before=3, window=1) == []


def test_a_game_of_before_turns_knew_their_seed(saved):
    path = saved / "game.json"
    document = json.loads(path.read_text())
    document["seed"] = 5
    for turn in document["turns"]:
        for name in ("seed", "window", "steps", "chosen_level"):
            del turn[name]
    path.write_text(json.dumps(document))
    turn = Game.load(saved).turns[0]
    assert (turn.seed, turn.window, turn.steps, turn.chosen_level) == (5, 3, 5, False)


def test_clips_are_joined_in_order(saved, tmp_path):
    game = Game.load(saved)
    path = tmp_path / "game.mp4"
    video.join_mp4([saved / turn.clip for turn in game.turns], path)
    frames = video.read_mp4(path)
    assert len(frames) == 4 * 5
    np.testing.assert_allclose(frames[::5].mean(axis=(1, 2, 3)), [1, 2, 3, 4], atol=1.5)
    video.write_mp4(tmp_path / "other.mp4", np.zeros((2, 32, 32, 3), np.uint8))
    with pytest.raises(UserError, match=r"other\.mp4: expected"):
        video.join_mp4([saved / game.turns[0].clip, tmp_path / "other.mp4"], path)


def test_the_storyboard_is_next_to_the_clips(saved):
    path = Game.load(saved).save_storyboard()
    assert path == saved / "storyboard.png"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_long_games_have_their_own_names(saved):
    game = Game.load(saved)
    game.turns = game.turns * 300  # 1200 turns
    add_turn(game)
    assert game.turns[-1].clip == "turn_1201.mp4"


def test_a_picture_is_the_turn_before_the_first(pictured):
    document = json.loads((pictured / "game.json").read_text())
    assert document["picture"] == {
        "instruction": "Hana stands.",
        "motion_level": 1,
        "social": 0,
        "entertainment": 0,
        "stamina": 1,
    }
    game = Game.load(pictured)
    assert game.turns[0].meters == Meters(stamina=45, social=55, entertainment=50)
    reported = [record.instruction for record in game.history(window=9)]
    assert reported == ["Hana stands.", "instruction 1", "instruction 2"]
    record = game.history(before=2)[0]
    assert record.states.tolist() == [1, 0, 0, 1]
    np.testing.assert_array_equal(record.representation, make_picture().representation)
    assert [len(game.history(before=1, window=w)) for w in (1, 2, 3)] == [0, 1, 1]
    assert [record.instruction for record in game.history()] == ["instruction 1", "instruction 2"]
    pixels = np.asarray(Image.open(pictured / "picture.png"))
    assert pixels.shape == (240, 360, 3)
    assert (pixels == 77).all()


def test_a_picture_outlives_undo_and_is_copied_to_branches(pictured, tmp_path):
    game = Game.load(pictured)
    game.set_aside(2)
    assert {"picture.png", "picture.npz"} <= files_of(game)
    found = Game.load(pictured)
    assert [record.instruction for record in found.history()] == ["Hana stands."]
    add_turn(found)
    for turns in (0, 1):
        branch = found.branch(tmp_path / f"branch{turns}", turns)
        loaded = Game.load(branch.folder)
        assert branch.picture == loaded.picture == found.picture
        assert loaded.history()[0].instruction == "Hana stands."
        assert {"picture.png", "picture.npz"} <= files_of(loaded)


def test_a_game_that_was_killed_before_it_began_begins(pictured, tmp_path):
    """The picture is written before game.json."""
    killed = tmp_path / "killed"
    killed.mkdir()
    for name in ("picture.png", "picture.npz"):
        shutil.copy(pictured / name, killed)
    with pytest.raises(UserError, match=r"found picture\.npz but no game\.json"):
        make_game(killed, picture=make_picture())  # they may be anybody's
    (killed / "game.json.part").touch()
    game = make_game(killed, picture=make_picture())
    assert files_of(game) == {"game.json", "picture.png", "picture.npz"}
    assert Game.load(killed).picture == game.picture


def test_the_storyboard_begins_with_the_picture(pictured):
    def size(folder: Path) -> tuple[int, int]:
        with Image.open(Game.load(folder).save_storyboard()) as picture:
            return picture.size

    width, height = size(pictured)
    edit(pictured, lambda document, turns: document.pop("picture"))
    without = size(pictured)
    assert width == without[0]
    assert height > without[1]


def test_a_picture_is_not_overwritten(tmp_path):
    (tmp_path / "picture.png").write_bytes(b"mine")
    with pytest.raises(UserError, match=r"found picture\.png but no game\.json"):
        make_game(tmp_path, picture=make_picture())
    assert (tmp_path / "picture.png").read_bytes() == b"mine"


def test_a_folder_that_holds_a_game_is_not_taken(saved, tmp_path):
    with pytest.raises(UserError, match=r"found game\.json.*--resume"):
        make_game(saved)
    (saved / "game.json").unlink()
    with pytest.raises(UserError, match=r"found turn_001\.mp4 but no game\.json.*--out"):
        make_game(saved)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="found a file"):
        make_game(tmp_path / "file")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "notes.txt").write_text("mine")
    make_game(tmp_path / "notes")
    assert (tmp_path / "notes" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("full", ["turn_005.mp4", "turn_005.npz", "game.json"])
def test_a_full_disk_leaves_the_earlier_turns_whole(saved, full):
    game = Game.load(saved)
    (saved / f"{full}.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        add_turn(game)
    assert len(game.turns) == 4
    assert [turn.turn for turn in Game.load(saved).turns] == [1, 2, 3, 4]
    assert not list(saved.glob("*.part"))
    add_turn(game)  # the space is there again
    assert len(Game.load(saved).turns) == 5


SCRIPT = """
import resource, sys
import numpy as np
from pathlib import Path
from animegamer_jax.game.saved.turns import NewTurn
from animegamer_jax.game.saved_game import Game
folder, limit = Path(sys.argv[1]), int(sys.argv[2])
game = Game.create(folder, model="tiny", seed=0, window=3, steps=5, protocol="paper")
rng = np.random.default_rng(0)
for number in range(1, 1000):
    if number == 5 and limit:
        sys.dont_write_bytecode = True  # truncated without a word: other processes read it
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    turn = NewTurn(
        states=np.array([3, 1, 0, -1], np.int32),
        motion_value=10.0,
        representation=rng.normal(size=(60, 80)).astype(np.float32),
        frames=rng.integers(0, 255, (5, 48, 72, 3), dtype=np.uint8),
        seconds={"mllm": 0.0, "decoder": 0.0, "vae": 0.0, "total": 0.0},
    )
    game.add(turn, f"instruction {number}")
    print(number, flush=True)
"""


def run_script(folder: Path, limit: int) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder), str(limit)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_file_size_limit_in_turn_five_leaves_four_turns(tmp_path):
    process = run_script(tmp_path / "game", 4096)
    _, errors = process.communicate(timeout=120)
    assert "File too large" in errors
    assert [turn.turn for turn in Game.load(tmp_path / "game").turns] == [1, 2, 3, 4]
    assert not list((tmp_path / "game").glob("*.part"))


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGKILL])
def test_a_killed_process_leaves_whole_turns(tmp_path, kind):
    process = run_script(tmp_path / "game", 0)
    for line in process.stdout:
        if int(line) == 7:
            process.send_signal(kind)
            break
    process.communicate(timeout=120)
    game = Game.load(tmp_path / "game")
    assert len(game.turns) >= 7
    for turn in game.turns:
        assert len(video.read_mp4(game.folder / turn.clip)) == 5
    assert game.history()[0].representation.shape == (60, 80)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_read_only_folder_is_reported(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="Permission denied"):
        make_game(tmp_path / "game")


def test_the_module_needs_no_jax():
    code = "import animegamer_jax.game.saved_game, sys; assert 'jax' not in sys.modules, 'jax'"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
