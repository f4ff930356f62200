"""Films are read as they are shown, whatever their container, and other files are recognised."""

import itertools
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from av.video.reformatter import Colorspace
from real_films import big_buck_bunny as big_buck_bunny
from tiny_films import moving, texture, write_frames, write_sound

from animegamer_jax.data.films.cutting.video_reader import (
    FilmError,
    FilmFrame,
    open_film,
    printable,
)


def read(path: Path, *, threads: int = 1) -> list[FilmFrame]:
    with open_film(path, threads=threads) as film:
        return list(film.frames())


def pictures(path: Path, *, threads: int = 1) -> np.ndarray:
    with open_film(path, threads=threads) as film:
        return np.stack([frame.rgb() for frame in film.frames()])


@pytest.mark.parametrize(
    ("name", "codec"),
    [("film.mp4", "libx264"), ("film.mkv", "libx264"), ("film.webm", "libvpx")],
)
def test_containers_and_codecs_give_the_same_film(tmp_path, name, codec):
    frames = moving(30, speed=2)
    path = write_frames(tmp_path / name, frames, codec=codec)
    with open_film(path) as film:
        found = [(frame.time, frame.rgb()) for frame in film.frames()]
        assert (film.height, film.width, film.damaged) == (48, 72, 0)
        assert film.announced == pytest.approx(30 / 24, abs=0.05)
    np.testing.assert_allclose([time for time, _ in found], np.arange(30) / 24, atol=1e-3)
    assert np.abs(np.stack([p for _, p in found]).astype(int) - frames).mean() < 6


def test_threads_change_nothing(tmp_path):
    path = write_frames(tmp_path / "film.mp4", moving(20))
    assert np.array_equal(pictures(path, threads=1), pictures(path, threads=3))


def test_times_are_those_of_the_frames(tmp_path):
    times = [0.0, 0.04, 0.1, 0.35, 0.36, 0.6]
    path = write_frames(tmp_path / "film.mkv", moving(6), times=[5 + time for time in times])
    np.testing.assert_allclose([frame.time for frame in read(path)], times, atol=1e-3)


@pytest.mark.parametrize("degrees", [90, 180, -90])
def test_turned_films_are_shown_upright(tmp_path, degrees):
    upright = texture(48, 72)
    stored = np.rot90(upright, -degrees // 90)  # counterclockwise, as libav turns
    path = write_frames(tmp_path / "film.mp4", [stored] * 3, rotation=degrees)
    with open_film(path) as film:
        assert (film.height, film.width) == (48, 72)
        frame = next(film.frames())
        assert np.abs(frame.rgb().astype(int) - upright).mean() < 6
        assert frame.rgb(height=24, width=36).shape == (24, 36, 3)
        assert frame.grey().shape == (48, 72)


def test_pixels_that_are_not_square_are_made_so(tmp_path):
    path = write_frames(tmp_path / "film.mp4", moving(3, width=60), aspect=Fraction(4, 3))
    with open_film(path) as film:
        assert (film.height, film.width) == (48, 80)
        assert next(film.frames()).rgb().shape == (48, 80, 3)


@pytest.mark.parametrize(
    ("colours", "tagged", "height"),
    [
        (Colorspace.ITU709, True, 48),
        (Colorspace.ITU601, True, 720),
        (Colorspace.ITU601, False, 48),
        (Colorspace.ITU709, False, 720),
    ],
)
def test_colours_are_right(tmp_path, colours, tagged, height):
    red = np.broadcast_to(np.array([200, 30, 60], np.uint8), (height, height * 3 // 2, 3))
    path = write_frames(tmp_path / "film.mkv", [red] * 2, colours=colours, tagged=tagged)
    assert np.abs(pictures(path).astype(int) - red).max() <= 4


def test_sizes_and_brightness(tmp_path):
    path = write_frames(tmp_path / "film.mp4", [np.zeros((48, 72, 3), np.uint8)] * 2)
    frame = read(path)[0]
    assert frame.grey().max() <= 1
    assert frame.rgb(height=16, width=24).shape == (16, 24, 3)


def test_what_is_left_of_a_film_is_read(tmp_path):
    frames = [np.roll(texture(48, 72, seed=k), k, axis=0) for k in range(60)]
    whole = write_frames(tmp_path / "film.mkv", frames).read_bytes()
    path = tmp_path / "cut.mkv"
    path.write_bytes(whole[: len(whole) * 2 // 3])
    with open_film(path) as film:
        found = list(film.frames())
        assert film.announced == pytest.approx(2.5, abs=0.05)
    assert 30 < len(found) < 50
    np.testing.assert_allclose([f.time for f in found], np.arange(len(found)) / 24, atol=1e-3)


def test_damaged_places_are_left_out(tmp_path):
    frames = [np.roll(texture(48, 72, seed=k), k, axis=0) for k in range(60)]
    data = bytearray(write_frames(tmp_path / "film.mp4", frames).read_bytes())
    middle = len(data) // 2
    data[middle : middle + 400] = bytes(400)
    (tmp_path / "bad.mp4").write_bytes(data)
    with open_film(tmp_path / "bad.mp4") as film:
        times = [frame.time for frame in film.frames()]
        assert film.damaged or len(times) < 60
    assert len(times) > 40
    assert times[-1] == pytest.approx(59 / 24, abs=1e-3)
    assert all(before < after for before, after in itertools.pairwise(times))


@pytest.mark.parametrize("starts", [(0, 0), (0, 9000, 0), (9000, 0)])
def test_joined_streams_are_read_to_the_end(tmp_path, starts):
    """The clock jumps back, and by hours; at a place or at one frame, it is the same."""
    data = b""
    for start in starts:
        times = [start + k / 25 for k in range(50)]
        data += write_frames(tmp_path / "part.ts", moving(50), times=times).read_bytes()
    (tmp_path / "film.ts").write_bytes(data)
    with open_film(tmp_path / "film.ts") as film:
        found = [frame.time for frame in film.frames()]
        assert film.announced is None
        assert film.skipped == 0
    assert len(found) == 50 * len(starts)
    np.testing.assert_allclose(found, np.arange(len(found)) / 25, atol=0.05)


def test_frames_out_of_order_are_left_out_and_counted(tmp_path):
    parts = ([k / 25 for k in range(50)], [1.5 + k / 25 for k in range(50)])  # half a second back
    data = b"".join(
        write_frames(tmp_path / "part.ts", moving(50), times=times).read_bytes() for times in parts
    )
    (tmp_path / "film.ts").write_bytes(data)
    with open_film(tmp_path / "film.ts") as film:
        found = [frame.time for frame in film.frames()]
        assert film.skipped == pytest.approx(12, abs=1)
    assert found[-1] == pytest.approx(1.5 + 49 / 25, abs=0.05)


def test_names_are_reported_in_a_line_of_letters():
    assert printable("Möwe 猫\u3000[01].mp4") == "Möwe 猫\u3000[01].mp4"
    assert printable("a\nb\udcf6\x1b\u2028") == r"a\nb\udcf6\x1b\u2028"
    assert str(FilmError("a\nb: no film")) == r"a\nb: no film"


@pytest.mark.parametrize("cover", [False, True])
def test_sound_is_no_film(tmp_path, cover):
    path = write_sound(tmp_path / "song.mp4", cover=cover)
    with av.open(str(path)) as container:
        assert len(container.streams.video) == cover
    with pytest.raises(FilmError, match=r"song\.mp4: expected a film, found sound only"):
        read(path)


def test_other_files_are_reported_in_one_line_and_nothing_else(tmp_path, capfd, caplog):
    whole = write_frames(tmp_path / "film.mp4", moving(24)).read_bytes()
    files = {
        "no.mp4": b"no film at all" * 200,
        "empty.mp4": b"",
        "cut.mp4": whole[: len(whole) * 2 // 3],  # its index was at the end
        "list.mp4": b"#EXTM3U\n#EXTINF:10,\nhttp://127.0.0.1:9/x.ts\n#EXT-X-ENDLIST\n",
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "folder.mp4").mkdir()
    for name, found in {
        "no.mp4": "Invalid data",
        "empty.mp4": "an empty file",
        "cut.mp4": "Invalid data",
        "list.mp4": "Invalid data",
        "folder.mp4": "",
        "missing.mp4": "No such file",
    }.items():
        with pytest.raises(FilmError, match=f"{name}: expected a film, found:? ?{found}") as error:
            read(tmp_path / name)
        assert "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")
    assert not caplog.records


def test_a_real_film(big_buck_bunny):
    with open_film(big_buck_bunny, name="bunny") as film:
        assert (film.name, film.height, film.width) == ("bunny", 720, 1280)
        times = [frame.time for frame in film.frames()]
    np.testing.assert_allclose(times, np.arange(132) / 25, atol=1e-3)
