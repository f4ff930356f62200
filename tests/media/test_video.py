"""Clips round-trip, the storyboard holds its turns, and nothing is ever half written."""

import io
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from animegamer_jax.data.characters import open_picture
from animegamer_jax.data.films.cutting.video_reader import open_film
from animegamer_jax.errors import UserError
from animegamer_jax.media import storyboard, video
from animegamer_jax.media.pictures import read_picture
from animegamer_jax.media.video import check_mp4, decode_mp4, read_mp4, write_mp4
from animegamer_jax.storage.files import write_whole


def make_clip(num_frames: int = 5, *, height: int = 48, width: int = 72) -> np.ndarray:
    """A soft gradient that moves, so that compression changes it little."""
    t, y, x = np.meshgrid(
        *(np.linspace(0, 1, n) for n in (num_frames, height, width)), indexing="ij"
    )
    channels = [60 + 120 * x, 80 + 100 * y, 200 - 100 * ((x + t) / 2)]
    return np.stack(channels, axis=-1).astype(np.uint8)


@pytest.mark.parametrize(("height", "width"), [(48, 72), (49, 73), (1, 1)])
def test_clips_come_back_as_they_were_written(tmp_path, height, width):
    frames = make_clip(17, height=height, width=width)
    path = tmp_path / "clip.mp4"
    video.write_mp4(path, frames)
    read = video.read_mp4(path)
    assert read.shape == (17, height + height % 2, width + width % 2, 3)
    # 8 bits, 4:2:0, quality 18: the usual error of such a clip is one or two levels of 255.
    assert np.abs(read[:, :height, :width].astype(int) - frames).mean() < 2.5


def test_a_clip_has_its_rate_and_the_same_bytes_each_time(tmp_path):
    import av

    # Coarse noise under fine noise: with x264's look-ahead this gave seven different files.
    rng = np.random.default_rng(0)
    coarse = rng.normal(size=(9, 8, 12, 3)).repeat(8, axis=1).repeat(8, axis=2)
    noise = 128 + 40 * coarse + 12 * rng.normal(size=(9, 64, 96, 3))
    frames = np.clip(noise, 0, 255).astype(np.uint8)
    files, memory = set(), []
    for attempt in range(30):
        memory.append(bytearray(attempt * 7919 % 90_000))  # so that the heap differs
        files.add(video.encode_mp4(frames.copy()))
    assert len(files) == 1
    video.write_mp4(tmp_path / "clip.mp4", frames)
    with av.open(str(tmp_path / "clip.mp4")) as container:
        stream = container.streams.video[0]
        assert (stream.average_rate, stream.frames, stream.format.name) == (8, 9, "yuv420p")
    assert [path.name for path in tmp_path.iterdir()] == ["clip.mp4"]


def test_a_clip_in_a_rare_codec_is_named(tmp_path):
    import av

    path = tmp_path / "clip.mp4"
    with av.open(str(path), "w", format="mov") as container:
        stream = container.add_stream("cinepak", rate=8)
        stream.height, stream.width, stream.pix_fmt = 48, 72, "rgb24"
        for frame in make_clip(2):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    refused = r"clip\.mp4: expected a video in a usual codec, such as H\.264, found cinepak: .*$"
    for read in (read_mp4, check_mp4, read_picture):
        with pytest.raises(UserError, match=refused):
            read(path)
    with pytest.raises(UserError, match=refused), open_film(path):
        pass


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a clip" * 100,
        b"ffconcat version 1.0\nfile real.mp4\n",  # a list of other files
        b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 9 RTP/AVP 96\n"
        b"a=rtpmap:96 H264/90000\n",  # would wait for a stream
        b"#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\nreal.mp4\n#EXT-X-ENDLIST\n",
    ],
)
def test_a_file_that_is_no_clip_is_named(tmp_path, content):
    path = tmp_path / "clip.mp4"
    path.write_bytes(content)
    video.write_mp4(tmp_path / "real.mp4", np.zeros((2, 16, 16, 3), np.uint8))
    for read in (video.read_mp4, video.check_mp4):
        with pytest.raises(UserError, match=r"clip\.mp4: expected a video, found"):
            read(path)
    with pytest.raises(UserError, match="clip: expected a video, found"):
        video.decode_mp4(content)
    with pytest.raises(UserError, match="no such file"):
        video.read_mp4(tmp_path / "other.mp4")


def test_tags_that_are_not_text_are_one_line(tmp_path):
    path = tmp_path / "clip.mp4"
    write_mp4(path, np.zeros((3, 16, 16, 3), np.uint8))
    content = path.read_bytes()
    path.write_bytes(content[:19] + b"\xff\xff\xff\x7f" + content[23:])  # one of the brands
    if int(av.__version__.partition(".")[0]) >= 19:  # which reads such tags
        assert read_mp4(path).shape == (3, 16, 16, 3)
        return
    found = r"found: tags that are not UTF-8"
    with pytest.raises(UserError, match=rf"clip\.mp4: expected a video, {found}"):
        read_mp4(path)
    with pytest.raises(UserError, match=rf"clip\.mp4: expected a film, {found}"), open_film(path):
        pass
    with pytest.raises(UserError, match=r"clip\.mp4: .* found neither \(tags that are not UTF-8"):
        read_picture(path)


def test_a_full_disk_keeps_the_old_file(tmp_path):
    path = tmp_path / "game.json"
    write_whole(path, b"old")
    # A device that is always full stands where the bytes would go first.
    (tmp_path / "game.json.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["game.json"]


def make_panels(count: int, *, instruction: str = "Character: Qiqi; Motion: run; Background: sky."):
    meters = {"stamina": 0, "social": 55, "entertainment": 100}
    changes = {"stamina": -1, "social": 1, "entertainment": 0}
    return [
        storyboard.Panel(
            turn=number,
            instruction=instruction,
            frames=video.pick_frames(make_clip(3)),
            motion_level=3,
            changes=changes,
            meters=meters,
        )
        for number in range(1, count + 1)
    ]


def open_png(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data), formats=["PNG"]).convert("RGB")


def test_the_storyboard_grows_down_and_then_sideways():
    one, ten, eleven, sixty = (
        open_png(storyboard.storyboard(make_panels(count), title="toy", note="seed 0"))
        for count in (1, 10, 11, 60)
    )
    assert ten.width == one.width
    assert ten.height > 4 * one.height
    assert eleven.width > 1.8 * ten.width
    assert eleven.height < ten.height
    assert 0.7 < sixty.width / sixty.height < 2


def test_the_storyboard_shows_the_frames():
    panels = make_panels(1)
    red = np.zeros((4, 48, 72, 3), np.uint8) + np.array([200, 10, 20], np.uint8)
    picture = np.asarray(open_png(storyboard.storyboard([panels[0]._replace(frames=red)])))
    share = (np.abs(picture.astype(int) - [200, 10, 20]).max(axis=-1) < 3).mean()
    assert share > 0.1


@pytest.mark.parametrize(
    "instruction",
    [
        "word " * 200,
        "x" * 500,
        "Motion: " + "very " * 100 + "; Background: day sky.",
        "魔女の宅急便",
        "évening; ; ;",
        ":;:;",
    ],
)
def test_any_instruction_can_be_drawn(instruction):
    picture = open_png(storyboard.storyboard(make_panels(1, instruction=instruction)))
    assert picture.width == open_png(storyboard.storyboard(make_panels(1))).width


def test_a_game_longer_than_the_storyboard_shows_its_last_turns():
    short = open_png(storyboard.storyboard(make_panels(storyboard.MAX_PANELS)))
    long = open_png(storyboard.storyboard(make_panels(storyboard.MAX_PANELS + 7)))
    assert short.size == long.size


def test_frames_are_picked_from_end_to_end():
    frames = np.arange(17, dtype=np.uint8)[:, None, None, None].repeat(3, axis=-1)
    assert video.pick_frames(frames)[:, 0, 0, 0].tolist() == [0, 5, 11, 16]
    assert len(video.pick_frames(frames[:2])) == 2


@pytest.mark.parametrize(("rows", "factor"), [(96, 3), (48, 5), (240, 1), (120, 2)])
def test_an_enlarged_clip_shrinks_back(rows, factor):
    """To the same pixels if the factor is odd."""
    x, y = np.meshgrid(np.arange(rows), np.arange(rows))
    frame = np.stack([x, y, 120 + 60 * np.sin(x / 5)], axis=-1).astype(np.uint8)
    larger = video.enlarge(frame[None])
    assert larger.shape[1] == factor * rows
    found = video.shrink(larger, factor).astype(int)
    np.testing.assert_allclose(found, frame[None].astype(int), atol=0 if factor % 2 else 4)


def test_small_clips_are_enlarged():
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (3, 48, 72, 3), dtype=np.uint8)
    larger = video.enlarge(frames)
    assert larger.shape == (3, 240, 360, 3)
    flat = np.full((2, 100, 20, 3), 70, np.uint8)
    np.testing.assert_array_equal(video.enlarge(flat), np.full((2, 300, 60, 3), 70, np.uint8))
    large = rng.integers(0, 256, (2, 240, 10, 3), dtype=np.uint8)
    assert video.enlarge(large) is large


def test_a_clip_needs_frames():
    with pytest.raises(ValueError, match="at least one pixel"):
        video.encode_mp4(np.zeros((0, 4, 4, 3), np.uint8))


def test_module_needs_no_jax():
    text = Path(video.__file__).read_text()
    assert "import jax\n" not in text


LISTS = {
    "ffconcat": "ffconcat version 1.0\nfile real.mp4\n",
    "itself": "ffconcat version 1.0\nfile list.mp4\n",
    "HLS": "#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\nreal.mp4\n#EXT-X-ENDLIST\n",
    "SDP": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\n"
    "m=video 5004 RTP/AVP 96\na=rtpmap:96 H264/90000\n",
}


@pytest.mark.parametrize("kind", LISTS)
def test_no_list_of_other_files_is_opened(tmp_path, kind):
    write_mp4(tmp_path / "real.mp4", np.zeros((3, 32, 32, 3), np.uint8))
    path = tmp_path / "list.mp4"
    path.write_text(LISTS[kind])

    def read_film(path: Path) -> None:
        with open_film(path):
            pass

    for read in (read_mp4, check_mp4, read_picture, read_film):
        with pytest.raises(UserError, match=r"list\.mp4: expected"):
            read(path)
    with pytest.raises(UserError, match="clip: expected a video"):
        decode_mp4(path.read_bytes())


def test_a_clip_that_would_fill_the_memory_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.mp4"
    frames = np.zeros((9, 32, 48, 3), np.uint8)
    write_mp4(path, frames)
    monkeypatch.setattr(video, "_MAX_BYTES", frames.nbytes)
    assert read_mp4(path).shape == frames.shape
    monkeypatch.setattr(video, "_MAX_BYTES", frames.nbytes - 1)
    pattern = r"expected a clip of at most 0 MB of pixels, found 9 frames of 48 x 32"
    for read in (read_mp4, check_mp4, lambda path: decode_mp4(path.read_bytes())):
        with pytest.raises(UserError, match=pattern):
            read(path)


def test_a_reference_picture_is_bounded_and_runs_no_program():
    """Pillow decodes EPS by Ghostscript, and by default refuses pictures only at 179 megapixels."""
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n%%EOF\n"
    with pytest.raises(UserError, match=r"^a: not an image .*: use another$"):
        open_picture(eps, name="a", hint="use another")
    buffer = io.BytesIO()
    Image.new("1", (10_000, 6_000)).save(buffer, format="PNG")
    with pytest.raises(UserError, match=r"^a: .*at most 50 million pixels, found 10000 x 6000"):
        open_picture(buffer.getvalue(), name="a", hint="use another")
