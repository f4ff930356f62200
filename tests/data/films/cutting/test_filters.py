"""Filters drop what they are for and nothing else; bars, sizes and held drawings are put right."""

import cv2
import numpy as np
import pytest
from tiny_films import moving, rolling, texture

from animegamer_jax.data.films.clips.store import FilmSettings
from animegamer_jax.data.films.cutting.filters import (
    PerceptualHash,
    brightness,
    is_credits,
    is_duplicate,
    perceptual_hash,
)
from animegamer_jax.data.films.cutting.letterbox import BarFinder, fitted
from animegamer_jax.errors import UserError
from animegamer_jax.media.motion import (
    clip_motion,
    motion_value,
    quantile_edges,
)
from animegamer_jax.media.video import decode_mp4, encode_mp4
from animegamer_jax.toy.drawing.draw import render
from animegamer_jax.toy.scene import (
    CHARACTERS,
    MOTIONS,
    PLACES,
    TIMES,
    Scene,
)

NUM_FRAMES = 17


def scene(number: int, **reported) -> Scene:
    values = {
        "character": CHARACTERS[number % 8],
        "motion": [m for m in MOTIONS if m != "talk"][number % 7],
        "place": PLACES[number % 6],
        "time": TIMES[number % 2],
        "level": 1 + number % 5,
        "partner": None,
        "seed": number,
    }
    return Scene(**{**values, **reported})


def drawings(shown: Scene) -> np.ndarray:
    """Returns a clip of a scene in which no drawing is held."""
    return render(shown, num_frames=2 * NUM_FRAMES - 1)[np.r_[0, 1 : 2 * NUM_FRAMES - 1 : 2]]


# Motion


def test_without_held_drawings_motion_is_as_before():
    for number in range(3):
        frames = drawings(scene(number))
        motion = clip_motion(frames)
        assert motion.value == motion_value(frames)
        assert len(motion.flow) == NUM_FRAMES - 1
        assert min(motion.flow) > 0
        assert 0 < motion.share < 1


@pytest.mark.parametrize("shown", [[0, 0, 1, 1, 2, 2, 3, 3, 4], [0, 0, 2, 3, 3, 5, 6, 7, 8]])
def test_held_drawings_have_the_speed_of_the_film(shown):
    """Once at half the speed, and once with a sample now and then that comes a frame late."""
    steps = np.array(moving(9, height=144, width=216, speed=4))
    speed = 4 * (shown[-1] - shown[0]) / (len(shown) - 1) * 480 / 144
    motion = clip_motion(steps[shown])
    assert motion.value == pytest.approx(speed, rel=0.1)
    assert np.mean(motion.flow) == pytest.approx(speed, rel=0.1)
    assert min(motion.flow) > 0
    raw = motion_value(steps[shown])
    assert raw > 1.25 * speed  # pairs without motion were not counted


def test_a_pause_is_no_held_drawing():
    steps = np.array(moving(9, height=144, width=216, speed=4))
    motion = clip_motion(steps[[0, 1, 2, 3, 3, 3, 3, 4, 5]])
    assert motion.flow[3:6] == (0.0, 0.0, 0.0)
    assert motion.value == pytest.approx(4 * 480 / 144, rel=0.1)


def test_the_end_of_a_swing_is_no_held_drawing():
    for seed in range(4):
        swing = scene(seed, motion="talk", partner=CHARACTERS[(seed + 1) % 8], level=3)
        frames = drawings(swing)
        assert clip_motion(frames).value == motion_value(frames)


def test_edges_of_quantiles_make_levels_of_one_size():
    values = [float(v) for v in np.random.default_rng(0).gamma(1.5, 6.0, 500)]
    edges = quantile_edges(values)
    assert len(edges) == 4
    counts = np.histogram(values, [0.0, *edges, np.inf])[0]
    assert counts.tolist() == [100] * 5
    assert len(quantile_edges(values, levels=3)) == 2
    for few in ([], [1.0, 1.0, 1.0], [0.0] * 50 + [1.0]):
        with pytest.raises(UserError, match=f"motion of {len(few)} clips: expected enough"):
            quantile_edges(few)


# Duplicates

DIFFERENCE = FilmSettings().duplicate_difference


def test_the_same_pictures_are_duplicates_in_any_size_and_compression():
    kept: list[PerceptualHash] = []
    clips = [render(scene(number), height=96, width=144) for number in range(12)]
    for clip in clips:
        assert not is_duplicate(perceptual_hash(clip), kept, difference=DIFFERENCE)
        kept.append(perceptual_hash(clip))
    for clip in clips:
        assert is_duplicate(
            perceptual_hash(decode_mp4(encode_mp4(clip))), kept, difference=DIFFERENCE
        )
        small = np.stack([cv2.resize(f, (72, 48), interpolation=cv2.INTER_AREA) for f in clip])
        assert is_duplicate(perceptual_hash(small), kept, difference=DIFFERENCE)
        assert is_duplicate(
            perceptual_hash((clip * 0.8).astype(np.uint8)), kept, difference=DIFFERENCE
        )


def test_the_same_place_with_another_motion_is_no_duplicate():
    kept: list[PerceptualHash] = []
    for motion in ("sit", "wave", "jump", "walk"):
        look = perceptual_hash(render(scene(1, motion=motion, level=2)))
        assert not is_duplicate(look, kept, difference=DIFFERENCE)
        kept.append(look)


def test_brightness_separates_black_from_night():
    nights = [render(scene(n, place=p, time="night")) for n, p in enumerate(PLACES)]
    assert min(brightness(frames) for frames in nights) > 25
    assert brightness(np.full((2, 4, 4, 3), 9, np.uint8)) == 9


# Credits


@pytest.mark.parametrize("speed", [0, 1, 3, 8])
@pytest.mark.parametrize(("ground", "ink"), [(0, 255), (250, 20), (60, 200)])
def test_credits_are_known_by_their_letters(speed, ground, ink):
    assert is_credits(rolling(speed=speed, ground=ground, ink=ink), letters=24)


def test_credits_are_known_in_a_compressed_clip_of_full_size():
    frames = rolling(speed=3)
    large = [cv2.resize(f, (720, 480), interpolation=cv2.INTER_CUBIC) for f in frames]
    assert is_credits(decode_mp4(encode_mp4(np.stack(large))), letters=24)


def test_what_has_no_letters_is_no_credits():
    rng = np.random.default_rng(0)
    for number in range(14):
        shown = scene(number, time="night" if number % 3 else "day")
        assert not is_credits(render(shown, height=240, width=360), letters=24)
    stars = np.zeros((240, 360, 3), np.uint8)
    for x, y, size in zip(*rng.integers(0, (360, 240, 4), (150, 3)).T, strict=True):
        cv2.circle(stars, (int(x), int(y)), int(size), (255, 255, 255), -1)
    assert not is_credits(np.stack([stars] * NUM_FRAMES), letters=24)
    snow = np.stack([np.roll(stars, (k * k, 3 * k), (0, 1)) for k in range(NUM_FRAMES)])
    assert not is_credits(snow, letters=24)


def test_letters_over_a_picture_or_few_or_unsteady_are_no_credits():
    letters = rolling(speed=2)
    picture = np.array(moving(NUM_FRAMES, height=240, width=360, speed=3))
    assert not is_credits(np.maximum(letters, picture), letters=24)
    assert not is_credits(letters, letters=2000)
    order = np.random.default_rng(0).permutation(NUM_FRAMES)
    assert not is_credits(rolling(speed=7)[order], letters=24)


# Bars and sizes


def found_bars(frames, *, height: int = 60, width: int = 90) -> tuple[int, int, int, int]:
    finder = BarFinder()
    for frame in frames:
        finder.add(frame)
    return finder.bars(height=height, width=width)


def barred(seed: int, *, top: int = 8, bottom: int = 7, left: int = 0, right: int = 0):
    grey = np.maximum(texture(60, 90, seed=seed)[..., 0], 60)
    frame = np.zeros((60, 90), np.uint8)
    rows, columns = slice(top, 60 - bottom), slice(left, 90 - right)
    frame[rows, columns] = grey[rows, columns]
    return frame


def test_bars_are_found_with_a_row_to_spare():
    assert found_bars([barred(seed) for seed in range(6)]) == (9, 8, 0, 0)
    sides = [barred(seed, top=0, bottom=0, left=12, right=10) for seed in range(6)]
    assert found_bars(sides) == (0, 0, 13, 11)


def test_dark_scenes_and_subtitles_do_not_mislead():
    frames = [barred(seed) for seed in range(10)]
    frames[1][:30] = frames[2][20:] = 0  # a dark sky, a dark ground
    frames[3][54:58, 20:70] = 255  # a subtitle
    frames += [np.full((60, 90), 5, np.uint8)] * 30  # a night without a light
    assert found_bars(frames) == (9, 8, 0, 0)


def test_a_film_without_bars_has_none():
    assert found_bars([barred(seed, top=0, bottom=0) for seed in range(6)]) == (0, 0, 0, 0)
    assert found_bars([np.zeros((60, 90), np.uint8)] * 9) == (0, 0, 0, 0)
    assert found_bars([barred(seed) for seed in range(2)]) == (0, 0, 0, 0)  # too few to tell
    strip = [barred(seed, top=25, bottom=25) for seed in range(6)]
    assert found_bars(strip) == (0, 0, 0, 0)  # a slit is no picture
    mixed = [barred(0), *[barred(seed, top=0, bottom=0) for seed in range(3)]]
    assert found_bars(mixed) == (0, 0, 0, 0)


def changes_of(frames: list[np.ndarray]) -> list[tuple[float, float]]:
    finder = BarFinder()
    for number, frame in enumerate(frames):
        finder.add(frame, time=number / 4)
    return finder.changes(height=60, width=90)


def test_bars_that_come_or_go_are_a_change():
    """A wipe uncovers the top before the bottom; three frames on both sides are enough."""
    wide, full = ([barred(seed, top=n, bottom=n) for seed in range(5)] for n in (9, 0))
    wipe = barred(7, top=0, bottom=9)
    assert changes_of([*wide, wipe, *full]) == [(1.0, 1.5)]
    assert changes_of([*full, *wide, *full[:3]]) == [(1.0, 1.25), (2.25, 2.5)]
    wider = [barred(seed, top=14, bottom=14) for seed in range(4)]
    assert changes_of([*wide, *wider]) == [(1.0, 1.25)]


def test_what_is_no_change_of_bars():
    wide, full = ([barred(seed, top=n, bottom=n) for seed in range(5)] for n in (9, 0))
    assert changes_of(wide) == changes_of(full) == []
    titled = [frame.copy() for frame in wide]
    for frame in titled:
        frame[54:58, 20:70] = 255
    assert changes_of([*wide, *titled, *wide]) == []  # subtitles for a while
    dark = [barred(seed, top=9, bottom=3) for seed in range(5)]  # a dark sky
    assert changes_of([*full, *dark]) == []
    assert changes_of([*wide, *full[:2], *wide]) == []  # a flash
    night = [np.full((60, 90), 5, np.uint8)] * 8
    assert changes_of([*wide, *night, *full]) == []  # two seconds in the dark: a fade of its own


def disc(height: int, width: int) -> np.ndarray:
    frame = np.full((height, width, 3), 40, np.uint8)
    cv2.circle(frame, (width // 2, height // 2), min(height, width) // 4, (250, 250, 250), -1)
    return frame


def extent(frame: np.ndarray) -> tuple[int, int]:
    light = frame[..., 0] > 140
    return int(light.any(axis=1).sum()), int(light.any(axis=0).sum())


@pytest.mark.parametrize("shape", [(90, 160), (160, 90), (120, 160), (40, 60), (81, 121)])
@pytest.mark.parametrize("fit", ["crop", "pad"])
def test_a_disc_stays_round_and_in_the_middle(shape, fit):
    frame = fitted(disc(*shape), bars=(0, 0, 0, 0), height=80, width=120, fit=fit)
    assert frame.shape == (80, 120, 3)
    rows, columns = extent(frame)
    assert abs(rows - columns) <= 2
    scale = (max if fit == "crop" else min)(80 / shape[0], 120 / shape[1])
    assert rows == pytest.approx(min(80, 2 * (min(shape) // 4) * scale), abs=2.5)
    for light in (frame[..., 0] > 140, (frame[..., 0] > 140).T):
        along = np.flatnonzero(light.any(axis=1))
        assert abs(along[0] - (len(light) - 1 - along[-1])) <= 2
    black = (frame.max(axis=-1) == 0).mean()
    shown = (shape[0] * shape[1]) * scale**2 / (80 * 120)
    assert black == pytest.approx(0 if fit == "crop" else 1 - shown, abs=0.03)


def test_bars_are_cut_off_before():
    frame = np.pad(disc(80, 120), ((9, 8), (4, 5), (0, 0)))
    plain = fitted(disc(80, 120), bars=(0, 0, 0, 0), height=80, width=120, fit="crop")
    assert np.array_equal(plain, disc(80, 120))
    assert np.array_equal(fitted(frame, bars=(9, 8, 4, 5), height=80, width=120, fit="pad"), plain)


def test_pairs_of_one_drawing_are_equal_in_a_compressed_clip():
    """What `clip_motion` relies on: the codec's noise is no motion."""
    frames = np.repeat(drawings(scene(3, level=3))[:5], 2, axis=0)
    motion = clip_motion(decode_mp4(encode_mp4(frames)))
    clean = clip_motion(frames)
    assert motion.value == pytest.approx(clean.value, rel=0.15)
    assert min(motion.flow[:-1]) > 0
    assert motion.flow[-1] == 0  # the last drawing: what comes next is not known
