import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.metrics.registry import LOOKS
from animegamer_jax.media.video import read_mp4
from animegamer_jax.toy.drawing.draw import render
from animegamer_jax.toy.drawing.poses import pose
from animegamer_jax.toy.films import make_film, write_film
from animegamer_jax.toy.scene import (
    ACCESSORIES,
    CHARACTERS,
    DISTANCES,
    LEVELS,
    MOTIONS,
    NAMES,
    PLACES,
    SIDES,
    STANDING,
    TIMES,
    Details,
    OwnCharacter,
    Scene,
)
from animegamer_jax.toy.scoring.attributes import DETAILS, VALUES, value_of
from animegamer_jax.toy.vocabulary import (
    ADVERBS,
    VERBS,
    WHERE,
    look_of_own,
    look_of_variant,
    look_of_view,
    split_words,
    words,
    write_detailed_captions,
)
from animegamer_jax.toy.world import (
    PROTOCOL,
    SPLITS,
    TEMPERS,
    ToyTurn,
    is_held_out,
    make_game,
    next_states,
    untold_level,
)

NUM_GAMES = 160


@pytest.fixture(scope="module")
def games() -> dict[str, list[tuple[ToyTurn, ...]]]:
    return {split: [make_game(i, split=split) for i in range(NUM_GAMES)] for split in SPLITS}


def turns_of(games: list[tuple[ToyTurn, ...]]) -> list[ToyTurn]:
    return [turn for game in games for turn in game]


def scene(**fields) -> Scene:
    plain = Scene("Mika", "walk", "meadow", "day", 3, None)
    return dataclasses.replace(plain, **fields)


def turn(shown: Scene, *, stamina: int = 1) -> ToyTurn:
    return ToyTurn("", False, "", "", shown, 0, 0, stamina)


# Games


def test_a_game_is_a_function_of_its_seed():
    code = (
        "import hashlib; from animegamer_jax.toy.world import make_game;"
        "from animegamer_jax.toy.drawing.draw import render;"
        "game = make_game(5, split='test');"
        "print(hashlib.sha256(repr(game).encode() + render(game[1].scene).tobytes()).hexdigest())"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(answers) == 1
    assert make_game(5) != make_game(6)


def test_splits_share_no_game_and_no_held_out_thing(games):
    said = [tuple(t.instruction for t in game) for split in SPLITS for game in games[split]]
    assert len(set(said)) == len(said)
    for split in SPLITS:
        held_out = {
            is_held_out(t.scene.character, t.scene.motion, t.scene.place)
            for t in turns_of(games[split])
        }
        assert held_out == {split == "combinations"}
    triples = list(itertools.product(CHARACTERS, MOTIONS, PLACES))
    assert sum(itertools.starmap(is_held_out, triples)) * 12 == len(triples)


def test_training_sees_each_pair_of_a_held_out_combination(games):
    shown = [(t.scene.character, t.scene.motion, t.scene.place) for t in turns_of(games["train"])]
    for pair in ((0, 1), (0, 2), (1, 2)):
        seen = {(s[pair[0]], s[pair[1]]) for s in shown}
        wanted = {
            (s[pair[0]], s[pair[1]])
            for s in itertools.product(CHARACTERS, MOTIONS, PLACES)
            if is_held_out(*s)
        }
        assert wanted <= seen


def test_fresh_phrasings_are_new_sentences_of_known_words(games):
    def forms(turns: list[ToyTurn]) -> set[str]:
        return {shape(t.instruction) for t in turns}

    train = turns_of(games["train"]) + turns_of(games["test"])
    fresh = turns_of(games["phrasings"])
    assert not forms(train) & forms(fresh)
    known = {word for t in train for word in split_words(t.instruction)}
    assert {word for t in fresh for word in split_words(t.instruction)} <= known


def shape(instruction: str) -> str:
    """An instruction with its particulars taken out."""
    text = instruction.lower()
    for verb in VERBS.values():
        for form in dataclasses.astuple(verb):
            text = re.sub(rf"\b{form.removesuffix(' {partner}')}\b", "V", text)
    adverbs = [adverb for level in LEVELS for adverb in ADVERBS[level]]
    for mark, options in (
        ("W", [where.lower() for where in WHERE.values()]),
        ("T", ["by day", "in the day", "by night", "at night"]),
        ("A", adverbs),
        ("C", [name.lower() for name in (*CHARACTERS, *NAMES)]),
        ("P", PLACES),
        ("t", TIMES),
    ):
        text = re.sub(rf"\b({'|'.join(options)})\b", mark, text)
    return text.replace("V to C", "V")


def test_words_are_closed_and_instructions_fit(games):
    rng = np.random.default_rng(0)
    known = set(words())
    assert words() == tuple(sorted(known))
    used = set()
    for t in (t for split in SPLITS for t in turns_of(games[split])):
        texts = (t.instruction, t.motion_text, t.caption, *write_detailed_captions(t.scene, rng))
        used |= {word for text in texts for word in split_words(text) if word.isalpha()}
        assert len(split_words(t.instruction)) <= 26 < PROTOCOL.caption_length
    assert used | {VERBS[STANDING].base} == known  # only typed by players


def test_texts_are_complete_and_parts_are_parts(games):
    rng = np.random.default_rng(0)
    for t in turns_of(games["train"])[:300]:
        caption = t.caption.lower()
        assert t.scene.character.lower() in caption
        assert t.scene.place in caption
        assert t.scene.time in caption
        assert any(adverb in caption for adverb in ADVERBS[t.scene.level])
        assert not {*itertools.chain(*ADVERBS.values())} & {*split_words(t.motion_text)}
        texts = write_detailed_captions(t.scene, rng)
        assert {t.scene.time, f"the {t.scene.place}", t.scene.details.accessory} <= {*texts}


def test_no_instruction_says_what_is_hidden(games):
    """Nor does the motion text; CLIP's captions say all of it, and no name of an own character."""
    hidden = {
        word for name in ("accessory", "variant", "side", "distance") for word in VALUES[name]
    }
    hidden = {word for text in hidden for word in text.split() if not word.isdigit()}
    rng = np.random.default_rng(0)
    for t in (t for split in SPLITS for t in turns_of(games[split])):
        said = {*split_words(t.instruction), *split_words(t.motion_text), *split_words(t.caption)}
        assert not said & hidden
        texts = write_detailed_captions(t.scene, rng)
        assert not {name.lower() for name in NAMES} & {*split_words(" ".join(texts))}
        details = t.scene.details
        assert look_of_view(details) in texts
        assert any(look_of_variant(t.scene.place, details.variant) in text for text in texts)
        if own := t.scene.own_looks(t.scene.character):
            assert look_of_own(own) in texts


def test_hidden_things_last(games):
    """An accessory is its character's, a variant its place's; a view lasts as long as the place."""
    changes = 0
    for game in itertools.chain(*games.values()):
        of: dict[tuple[str, str], object] = {}
        for before, t in itertools.pairwise((None, *game)):
            shown, details = t.scene, t.scene.details
            for key, value in (
                (("accessory", shown.character), details.accessory),
                (("variant", shown.place), details.variant),
                *(
                    [(("accessory", shown.partner), details.partner_accessory)]
                    * bool(shown.partner)
                ),
            ):
                assert of.setdefault(key, value) == value
            view = details.side, details.distance
            if before is not None and before.scene.place == shown.place:
                assert view == (before.scene.details.side, before.scene.details.distance)
            elif before is not None:
                changes += view != (before.scene.details.side, before.scene.details.distance)
    assert changes > 100


def test_every_hidden_value_occurs_as_often(games):
    turns = turns_of(games["train"])
    for name in DETAILS:
        found = [VALUES[name].index(str(value_of(t.scene, name))) for t in turns]
        shares = np.bincount(found, minlength=len(VALUES[name])) / len(turns) * len(VALUES[name])
        assert 0.6 < shares.min() <= shares.max() < 1.5, name


def test_own_characters(games):
    """They begin with a picture; training shows each part of their looks, not the combination."""

    def owned(split: str) -> list[OwnCharacter]:
        return [game[0].scene.own for game in games[split] if game[0].scene.own]

    assert 0.3 < len(owned("train")) / NUM_GAMES < 0.5
    assert not owned("test")
    assert len(owned("own")) == NUM_GAMES
    assert all(own.is_held_out for own in owned("own"))
    assert not any(own.is_held_out for own in owned("train"))
    for name in ("hair_colour", "hair", "clothes"):
        fresh, trained = ({getattr(o, name) for o in owned(split)} for split in ("own", "train"))
        assert fresh <= trained, name
    for game in games["own"]:
        assert game[0].scene.motion == STANDING
        assert game[0].instruction.startswith(
            f"Character: {game[0].scene.character}; Motion: stand"
        )
        assert (game[0].scene.level, game[0].social, game[0].stamina) == (1, 0, 1)
        assert {t.scene.own for t in game if t.scene.own} == {game[0].scene.own}
    acts = [t.scene.character in NAMES for game in games["own"] for t in game[1:]]
    assert 0.6 < np.mean(acts) < 0.9


# Open instructions


def read(instruction: str, history: tuple[ToyTurn, ...]) -> dict[str, object]:
    """A player who knows the language and the turns before, but has seen nothing."""
    before = history[-1].scene if history else None
    text = " ".join(split_words(instruction))
    said: dict[str, object] = {}
    gerunds = dict(
        pair for m, v in VERBS.items() for pair in ((v.base, m), (v.gerund, m), (v.third, m))
    )
    for form, motion in gerunds.items():
        stem = form.removesuffix(" {partner}")
        if found := re.search(rf"\b{stem}\b(?: (\w+))?", text):
            said["motion"] = motion
            said["partner"] = found[1].capitalize() if motion == "talk" else None
            text = text.replace(found[0] if motion == "talk" else stem, "")
    everyone = (*CHARACTERS, *NAMES)
    for name, options in (("character", everyone), ("place", PLACES), ("time", TIMES)):
        for option in options:
            if re.search(rf"\b{option.lower()}\b", text):
                said[name] = option
    for level, adverbs in ADVERBS.items():
        if set(adverbs) & set(text.split()):
            said["level"] = level
    full = {"character", "motion", "place", "time"} <= said.keys()
    known: dict[str, object] = {} if full else plain_fields(before)
    step = ("faster" in text) - ("slower" in text)
    if step:
        known["level"] = min(max(before.level + step, 1), 5)
    elif full or before.character != said.get("character", before.character):
        known["level"] = untold_level(history, str(said["character"]))
    elif "motion" in said and not text.startswith(("go on", "then go on")):
        known["level"] = untold_level(history, before.character)
    if said.get("motion") == STANDING:
        known["level"] = 1
    return known | {"partner": known.get("partner")} | said


def plain_fields(shown: Scene) -> dict[str, object]:
    """What words can say of a scene."""
    names = ("character", "motion", "place", "time", "level", "partner")
    return {name: getattr(shown, name) for name in names}


@pytest.mark.parametrize("split", SPLITS)
def test_history_and_only_history_resolves_open_instructions(games, split):
    answers: dict[str, set[tuple]] = {}
    for game in games[split]:
        assert not game[0].is_open
        for number, t in enumerate(game):
            fields = plain_fields(t.scene)
            assert read(t.instruction, game[:number]) == fields, (t.instruction, game[:number])
            answers.setdefault(t.instruction, set()).add(tuple(fields.values()))
    opened = [t for t in turns_of(games[split]) if t.is_open]
    later = sum(t is not game[0] for game in games[split] for t in game[:-1]) + NUM_GAMES
    later -= sum(t.scene.motion == STANDING for t in turns_of(games[split]))
    assert 0.55 < len(opened) / later < 0.65
    common = [t for t in opened if sum(o.instruction == t.instruction for o in opened) > 5]
    assert all(len(answers[t.instruction]) > 1 for t in common)


def test_half_of_the_full_instructions_have_the_released_form(games):
    full = [t.instruction for t in turns_of(games["train"]) if not t.is_open]
    full = [text for text in full if "Motion: standing" not in text]
    share = sum(bool(re.match(r"Character: .*; Motion: .*; Background: ", i)) for i in full)
    assert 0.4 < share / len(full) < 0.6


# Rules


def test_rules_by_example():
    walk, run = scene(), scene(motion="run", level=4)
    talk = scene(motion="talk", partner="Ren", level=4)
    wave, sleep = scene(motion="wave"), scene(motion="sleep", level=5)
    assert next_states([], walk) == (0, 1, -1)
    assert next_states([], scene(level=2)) == (0, 1, 1)
    assert next_states([turn(walk)], walk) == (0, 0, -1)
    assert next_states([turn(scene(place="beach"))], walk) == (0, 1, -1)
    assert next_states([], run) == (0, 1, -1)
    assert next_states([turn(run, stamina=-1)], run) == (0, 0, -1)
    assert next_states([], scene(motion="fly", level=2)) == (0, 0, -1)
    tired = [turn(run, stamina=-1), turn(talk, stamina=-1)]
    assert next_states(tired, run) == (0, 1, -2)
    assert next_states(tired, sleep) == (0, 0, 1)
    assert next_states([], sleep) == (0, 0, 1)
    assert next_states([], wave) == (1, 0, 1)
    assert next_states([turn(wave)], wave) == (0, 0, 1)
    assert next_states([turn(wave), turn(walk)], wave) == (1, 0, 1)
    assert next_states([], talk) == (1, 1, -1)
    rest = [turn(walk)] * 3
    assert next_states([turn(talk), *rest], talk) == (0, 1, -1)
    assert next_states([turn(talk), *rest, turn(walk)], talk) == (1, 1, -1)
    other = dataclasses.replace(talk, partner="Hana", level=3)
    assert next_states([turn(talk)], other) == (1, 0, 1)


@pytest.mark.parametrize("split", ["train", "test"])
def test_each_exception_of_a_rule_occurs(games, split):
    cases: dict[str, list[bool]] = {}

    def note(rule: str, excepted: bool) -> None:
        cases.setdefault(rule, []).append(excepted)

    for t in (t for game in games[split] for t in game[1:]):
        motion, level = t.scene.motion, t.scene.level
        if t.stamina < 0:
            note("tired", t.stamina == -2)
        if motion in ("talk", "wave"):
            note(motion, t.social == 0)
        if motion in ("run", "jump", "fly") and level >= 3:
            note("thrill", t.entertainment == 0)
        if motion == "talk" and level >= 4:
            note("lively talk", t.entertainment == 0)
        if motion == "walk":
            note("walk", t.entertainment == 0)
    assert len(cases) == 6
    for rule, exceptions in cases.items():
        assert 0.08 <= np.mean(exceptions) <= 0.92, rule


def test_the_window_suffices_for_the_rules(games):
    for game in games["train"]:
        for number, t in enumerate(game):
            states = next_states(game[max(0, number - PROTOCOL.window + 1) : number], t.scene)
            assert states == (t.social, t.entertainment, t.stamina)


# Pictures


def test_sizes_differ_in_resolution_only():
    for motion, time in (("run", "day"), ("talk", "night")):
        shown = scene(
            motion=motion, time=time, partner="Nori" if motion == "talk" else None, seed=4
        )
        small = render(shown, height=48, width=72).astype(float)
        large = render(shown, height=480, width=720)[::8].astype(float)
        reduced = large.reshape(3, 48, 10, 72, 10, 3).mean(axis=(2, 4))
        difference = np.abs(reduced - small[::8])
        assert difference.mean() < 3.0
        assert np.quantile(difference, 0.99) < 40


def test_chance_changes_how_a_clip_begins():
    """To which side a motion begins, as the first frame shows, and its pace."""
    for motion in ("walk", "sit"):
        plain = scene(motion=motion, level=4)
        drawn = [dataclasses.replace(plain, seed=s) for s in range(16)]
        shadows = [pose(one, num_frames=17).layers[0].points.mean(1)[:, 0] for one in drawn]
        steps = np.array([shadow[2] - shadow[0] for shadow in shadows])  # drawn on twos
        assert {*np.sign(steps)} == {-1, 1}
        assert len({*np.abs(steps).round(6)}) == 16
        assert np.ptp(np.abs(steps)) < 0.07 * np.abs(steps).mean()
        firsts = np.stack([render(one, num_frames=1)[0].astype(int) for one in drawn])
        alike = np.abs(firsts[:, None] - firsts[None]).mean((2, 3, 4))
        same = np.sign(steps)[:, None] == np.sign(steps)[None]
        assert alike[same].max() < alike[~same].min()
    assert len({t.scene.seed for t in turns_of([make_game(0), make_game(1)])}) == 10


@pytest.mark.parametrize(
    "change",
    [
        {"accessory": ACCESSORIES[-1]},
        {"variant": 1},
        {"side": SIDES[1]},
        {"distance": DISTANCES[1]},
    ],
)
@pytest.mark.parametrize("motion", [*MOTIONS, STANDING])
def test_each_detail_is_seen_in_each_motion(motion, change):
    partner = "Ren" if motion == "talk" else None
    plain = scene(motion=motion, partner=partner, level=1, place="town")
    other = dataclasses.replace(plain, details=dataclasses.replace(Details(), **change))
    first, second = (render(s, num_frames=1)[0].astype(int) for s in (plain, other))
    assert (np.abs(first - second).max(-1) > 60).mean() > 0.006


@pytest.mark.parametrize("motion", [*MOTIONS, STANDING])
def test_looks_differ_in_each_motion(motion):
    """Every two values of what a scene says it shows; a sleeper's hair and clothes are hidden."""
    partner = "Ren" if motion == "talk" else None
    own = OwnCharacter(NAMES[0], *(VALUES[name][0] for name in LOOKS))
    plain = scene(character=own.name, motion=motion, partner=partner, level=1, own=own)
    for name in ("hair", "clothes"):
        assert (value_of(plain, name) is None) == (motion == "sleep")
    for name in LOOKS:
        if value_of(plain, name) is None:
            continue
        changes = [{name.replace(" ", "_"): value} for value in VALUES[name]]
        others = [
            dataclasses.replace(plain, own=dataclasses.replace(own, **change)) for change in changes
        ]
        frames = [render(other, num_frames=1)[0].astype(int) for other in others]
        for one, other in itertools.combinations(frames, 2):
            assert (np.abs(one - other).max(-1) > 30).mean() > 0.001, name


def test_the_tired_and_the_calm_move_slower():
    tired = [turn(scene(), stamina=-1)] * 2
    for name, level in TEMPERS.items():
        assert untold_level([], name) == level
        assert untold_level(tired, name) == level - 1
    assert untold_level([], NAMES[0]) == 3
    assert len({*TEMPERS.values()}) == 3


def test_clips_are_drawn_on_twos_and_move_below_a_pixel():
    slow = scene(character="Ren", motion="walk", level=1, place="town", seed=2)
    frames = render(slow, height=48, width=72).astype(int)
    steps = np.abs(np.diff(frames, axis=0))
    changes = steps.reshape(16, -1).max(axis=1)
    assert not changes[1::2].any(), "a drawing is held for two frames, the first for one"
    assert np.all(changes[::2] > 2), "every drawing differs from the one before"
    assert steps.max() < 90


def draw_scenes(rng: np.random.Generator, *, rounds: int) -> list[Scene]:
    """Each character, place and time `rounds` times, with any motion and level."""
    scenes = []
    for character, place, time in list(itertools.product(CHARACTERS, PLACES, TIMES)) * rounds:
        motion = str(rng.choice(MOTIONS))
        partner = str(rng.choice([name for name in CHARACTERS if name != character]))
        scenes.append(
            Scene(
                character=character,
                motion=motion,
                place=place,
                time=time,
                level=int(rng.choice(LEVELS)),
                partner=partner if motion == "talk" else None,
                seed=int(rng.integers(2**31)),
            )
        )
    return scenes


def colours(frame: np.ndarray) -> np.ndarray:
    """How much there is of each of 512 colours, as square roots of shares."""
    bins = (frame // 32).reshape(-1, 3) @ (64, 8, 1)
    return np.sqrt(np.bincount(bins, minlength=512) / len(bins))


def test_first_frames_show_character_place_and_time():
    """By the nearest mean of colours, learned from other scenes."""
    rng = np.random.default_rng(0)
    known = [s for s in draw_scenes(rng, rounds=6) if s.motion != "talk"]
    asked = [s for s in draw_scenes(rng, rounds=1) if s.motion != "talk"]
    looks: dict[tuple[str, str, str], list[np.ndarray]] = {}
    for s in known:
        key = s.character, s.place, s.time
        looks.setdefault(key, []).append(colours(render(s, num_frames=1)[0]))
    names = list(looks)
    centres = np.stack([np.mean(looks[name], axis=0) for name in names])
    right = np.zeros(3)
    for s in asked:
        distances = np.linalg.norm(centres - colours(render(s, num_frames=1)[0]), axis=1)
        answer = names[int(distances.argmin())]
        right += np.array(answer) == (s.character, s.place, s.time)
    assert np.all(right / len(asked) >= 0.99)


def test_who_speaks_is_seen():
    for seed in range(4):
        talk = scene(motion="talk", partner="Kai", seed=seed)
        swapped = dataclasses.replace(talk, character="Kai", partner="Mika")
        difference = render(talk, num_frames=1).astype(int) - render(swapped, num_frames=1)
        assert np.abs(difference).mean() > 8


# Films


def test_films_cut_where_the_truth_says():
    film = make_film(3, num_shots=5, height=48, width=72)
    frames = np.stack(list(film.frames()))
    assert [f.tobytes() for f in make_film(3, num_shots=5, height=48, width=72).frames()] == [
        f.tobytes() for f in frames
    ]
    assert len(frames) == film.shots[-1].end
    cuts = [shot.start for shot in film.shots[1:]]
    jumps = np.abs(np.diff(frames.astype(int), axis=0)).mean(axis=(1, 2, 3))
    within = np.delete(jumps, np.array(cuts) - 1)
    assert jumps[np.array(cuts) - 1].min() > 1.5 * np.quantile(within, 0.95)
    for shot in film.shots:
        assert 16 <= shot.end - shot.start <= 48
        clip = render(shot.scene, height=48, width=72, num_frames=shot.end - shot.start)
        assert np.array_equal(frames[shot.start : shot.end], clip)


def test_transitions_blend_the_end_of_one_shot_into_the_next():
    @dataclasses.dataclass(frozen=True)
    class Half:
        name: str = "half"
        overlap: int = 3

        def join(self, before: np.ndarray, after: np.ndarray) -> np.ndarray:
            return ((before.astype(int) + after) // 2).astype(np.uint8)

    film = make_film(1, num_shots=2, height=24, width=36, transitions=[Half()])
    frames = np.stack(list(film.frames()))
    first, second = film.shots
    assert len(frames) == second.end
    before = render(first.scene, height=24, width=36, num_frames=first.end + 3)[first.end :]
    after = render(second.scene, height=24, width=36, num_frames=second.end - second.start)
    blended = Half().join(before, after[:3])
    assert np.array_equal(frames[second.start : second.start + 3], blended)
    assert np.array_equal(frames[second.start + 3 :], after[3:])


def test_films_are_written_with_their_truth(tmp_path: Path):
    film = make_film(2, num_shots=2, height=48, width=72)
    write_film(tmp_path / "film.mp4", film)
    truth = json.loads((tmp_path / "film.json").read_text())
    frames = read_mp4(tmp_path / "film.mp4")
    assert len(frames) == truth["shots"][-1]["end"]
    assert np.abs(frames.astype(int) - np.stack(list(film.frames()))).mean() < 6
    assert [shot["transition"] for shot in truth["shots"]] == [None, "cut"]
    assert truth["shots"][0]["character"] == film.shots[0].scene.character
    with pytest.raises(UserError, match=r"film\.avi: expected a name that ends in \.mp4"):
        write_film(tmp_path / "film.avi", film)
    with pytest.raises(UserError, match="a film of 0 shots: expected 1 or more"):
        make_film(2, num_shots=0)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"place of a walk scene: expected meadow, .*, found moon"):
        scene(place="moon")
    with pytest.raises(ValueError, match="partner of a walk scene: expected None, found Ren"):
        scene(partner="Ren")
