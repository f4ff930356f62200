"""Pictures of players: every kind of file that has one, and every file that is refused."""

import io
import zlib
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny_films import moving, texture, write_frames

from animegamer_jax.errors import UserError
from animegamer_jax.media import pictures, video
from animegamer_jax.media.pictures import Picture, fit_picture, read_picture


def noise(height: int = 32, width: int = 48, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def smooth(height: int = 32, width: int = 48) -> np.ndarray:
    y, x = np.meshgrid(np.linspace(0, 1, height), np.linspace(0, 1, width), indexing="ij")
    return np.stack([40 + 180 * x, 60 + 120 * y, 200 - 150 * x], axis=-1).astype(np.uint8)


def save(path: Path, image: Image.Image | np.ndarray, **options) -> Path:
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    image.save(path, **options)
    return path


@pytest.mark.parametrize("kind", ["png", "bmp", "tiff", "ppm", "webp", "gif", "jpg", "avif", "jp2"])
def test_every_format_is_read(tmp_path, kind):
    options = {"lossless": True} if kind == "webp" else {}
    picture = read_picture(save(tmp_path / f"hero.{kind}", smooth(), **options))
    assert (picture.note, picture.is_video) == ("", False)
    close = {"jpg": 3, "avif": 4, "gif": 12, "jp2": 1}.get(kind, 0)
    assert np.abs(picture.pixels.astype(int) - smooth()).mean() <= close


def test_the_name_of_a_file_does_not_matter(tmp_path):
    path = save(tmp_path / "hero.png", noise()).rename(tmp_path / "hero.mp4")
    np.testing.assert_array_equal(read_picture(path).pixels, noise())


def test_transparent_parts_are_white(tmp_path):
    rgba = np.dstack([noise(), np.full((32, 48), 255, np.uint8)])
    rgba[:, :24, 3] = 0
    rgba[:, 24:30, 3] = 128
    found = read_picture(save(tmp_path / "hero.png", rgba)).pixels
    assert (found[:, :24] == 255).all()
    np.testing.assert_array_equal(found[:, 30:], noise()[:, 30:])
    half = (noise()[:, 24:30].astype(int) * 128 + 255 * 127) / 255
    assert np.abs(found[:, 24:30] - half).max() <= 1
    palette = Image.new("P", (20, 20), 1)
    palette.putpalette([10, 20, 30, 200, 0, 0])
    palette.putpixel((0, 0), 0)
    found = read_picture(save(tmp_path / "palette.png", palette, transparency=0)).pixels
    assert found[0, 0].tolist() == [255, 255, 255]
    assert found[5, 5].tolist() == [200, 0, 0]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_picture_is_upright(tmp_path, orientation):
    upright, exif = noise(), Image.Exif()
    exif[0x0112] = orientation
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright, 1),
        7: upright.transpose(1, 0, 2)[::-1, ::-1],
        8: np.rot90(upright, -1),
    }[orientation]
    path = save(tmp_path / "hero.png", np.ascontiguousarray(stored), exif=exif)
    np.testing.assert_array_equal(read_picture(path).pixels, upright)


def test_grey_pictures_and_16_bits(tmp_path):
    grey = noise()[..., 0]
    expected = np.repeat(grey[..., None], 3, axis=2)
    for name, stored in (("l.png", grey), ("i16.png", grey.astype(np.uint16) * 257)):
        found = read_picture(save(tmp_path / name, stored))
        np.testing.assert_array_equal(found.pixels, expected)
    wide = Image.fromarray(grey.astype(np.int32) * 257)
    assert wide.mode == "I"
    np.testing.assert_array_equal(read_picture(save(tmp_path / "i.tiff", wide)).pixels, expected)
    every = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    found = read_picture(save(tmp_path / "every.png", every)).pixels
    np.testing.assert_array_equal(found[..., 2], (every / 257).round())
    beyond = Image.fromarray(
        np.repeat([[-300, 70_000]], 20, axis=0).repeat(10, axis=1).astype("i4")
    )
    found = read_picture(save(tmp_path / "beyond.tiff", beyond)).pixels
    assert found[0, ::10].tolist() == [[0, 0, 0], [255, 255, 255]]
    bits = Image.fromarray(grey > 128)
    found = read_picture(save(tmp_path / "bits.png", bits)).pixels
    np.testing.assert_array_equal(found[..., 0], np.where(grey > 128, 255, 0))
    inks = Image.new("CMYK", (20, 20), (0, 255, 0, 0))
    found = read_picture(save(tmp_path / "inks.jpg", inks)).pixels
    assert np.abs(found.astype(int) - (255, 0, 255)).max() < 4


def chunk(kind: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")


def png(width: int, height: int, *, bits: int, colour: int, rows: bytes) -> bytes:
    """A PNG of raw rows; Pillow writes no RGB of 16 bits."""
    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([bits, colour, 0, 0, 0])
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def test_16_bits_of_rgb(tmp_path):
    rows = b"".join(b"\0" + (row.astype(">u2") * 257).tobytes() for row in noise())
    (tmp_path / "hero.png").write_bytes(png(48, 32, bits=16, colour=2, rows=rows))
    np.testing.assert_array_equal(read_picture(tmp_path / "hero.png").pixels, noise())


@pytest.mark.parametrize("kind", ["gif", "png", "webp", "tiff"])
def test_of_several_pictures_the_first_is_used(tmp_path, kind):
    images = [Image.new("RGB", (48, 32), colour) for colour in ("red", "blue", "green")]
    options = {"lossless": True} if kind == "webp" else {}
    path = tmp_path / f"hero.{kind}"
    images[0].save(path, save_all=True, append_images=images[1:], **options)
    found = read_picture(path, name="hero")
    assert (found.pixels == (255, 0, 0)).all()
    assert found.note == "hero holds several pictures: the first is used."


def test_of_a_video_the_first_frame_is_used(tmp_path):
    frames = np.stack([smooth(), smooth()[:, ::-1], smooth()])
    video.write_mp4(tmp_path / "shot.mp4", frames)
    found = read_picture(tmp_path / "shot.mp4", name="shot.mp4")
    assert found.is_video
    assert found.note == "shot.mp4 is a video: its first frame is used."
    np.testing.assert_allclose(found.pixels, frames[0], atol=12)
    assert np.abs(found.pixels.astype(int) - frames[0]).mean() < 2.5


@pytest.mark.parametrize("degrees", [90, 180, -90])
def test_a_turned_video_is_upright(tmp_path, degrees):
    stored = np.rot90(texture(48, 72), -degrees // 90)
    path = write_frames(tmp_path / "shot.mp4", [stored] * 3, rotation=degrees)
    found = read_picture(path).pixels
    assert found.shape == (48, 72, 3)
    assert np.abs(found.astype(int) - texture(48, 72)).mean() < 6


def test_a_video_gets_square_pixels(tmp_path):
    path = write_frames(tmp_path / "shot.mp4", moving(3, width=60), aspect=Fraction(4, 3))
    assert read_picture(path).pixels.shape == (48, 80, 3)


def test_a_huge_picture_is_refused_before_it_is_decoded(tmp_path, monkeypatch):
    def decode(*_, **__):
        raise AssertionError("decoded")

    monkeypatch.setattr(Image.Image, "load", decode)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", decode)
    for width, height in ((10_000, 5001), (12_000, 12_000), (30_000, 30_000)):
        path = tmp_path / "bomb.png"
        rows = b"" if width > 12_000 else bytes(10)
        path.write_bytes(png(width, height, bits=1, colour=0, rows=rows))
        with pytest.raises(UserError, match=r"bomb\.png: expected a picture of at most 50 mil"):
            read_picture(path)


def test_a_huge_video_is_refused_before_it_is_decoded(tmp_path, monkeypatch):
    video.write_mp4(tmp_path / "shot.mp4", np.stack([smooth()] * 2))
    monkeypatch.setattr(pictures, "MAX_PIXELS", 32 * 48 - 1)
    with pytest.raises(UserError, match=r"shot\.mp4: expected a picture of at most .*48 x 32: sav"):
        read_picture(tmp_path / "shot.mp4")
    monkeypatch.setattr(pictures, "_check_size", lambda *_: None)  # a header that is wrong
    with pytest.raises(UserError, match=r"shot\.mp4: expected a picture .*found neither"):
        read_picture(tmp_path / "shot.mp4")


def cut(data: bytes, share: float) -> bytes:
    return data[: int(len(data) * share)]


def encoded(kind: str, image: np.ndarray | Image.Image) -> bytes:
    buffer = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(buffer, kind)
    return buffer.getvalue()


def with_large_profile() -> bytes:
    """A PNG with a colour profile that Pillow refuses to unpack when it opens the file."""
    stream = io.BytesIO()
    Image.new("RGB", (20, 20)).save(stream, "PNG", icc_profile=bytes(2_000_000))
    return stream.getvalue()


PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n%s\n#EXT-X-ENDLIST\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "found neither"),
        (b"not a picture", "found neither"),
        (b"\x89PNG\r\n\x1a\n", "found neither"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 99 99\n", "found neither"),
        (b'<svg xmlns="http://www.w3.org/2000/svg" width="99" height="99"/>', "found neither"),
        (b"\0\0\0\x18ftypheic" + bytes(99), "found HEIC: save as JPEG"),
        (cut(encoded("PNG", noise()), 0.5), "a damaged picture: image file is truncated"),
        (cut(encoded("JPEG", noise()), 0.5), "a damaged picture: image file is truncated"),
        (with_large_profile(), "a damaged picture: Decompressed data too large"),
        (cut(video.encode_mp4(np.stack([smooth()] * 2)), 0.5), "found neither"),
        (encoded("PNG", noise(15, 400)), "at least 16 x 16 pixels, found 400 x 15"),
        (encoded("PNG", noise(1, 1)), "at least 16 x 16 pixels, found 1 x 1"),
        (
            encoded("TIFF", Image.new("F", (20, 20))),
            "a damaged picture: expected 8 or 16 bits a channel, found floating-point numbers",
        ),
    ],
)
def test_what_is_no_picture_is_one_line(tmp_path, content, message):
    path = tmp_path / "hero.png"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"^{path}: .*{message}") as caught:
        read_picture(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"^hero: "):
        read_picture(path, name="hero")


def test_a_playlist_opens_no_other_file(tmp_path):
    video.write_mp4(tmp_path / "secret.mp4", np.stack([smooth()] * 2))
    (tmp_path / "list.mp4").write_bytes(PLAYLIST % str(tmp_path / "secret.mp4").encode())
    (tmp_path / "concat.mp4").write_text(f"ffconcat version 1.0\nfile {tmp_path}/secret.mp4\n")
    for name in ("list.mp4", "concat.mp4"):
        with pytest.raises(UserError, match="found neither"):
            read_picture(tmp_path / name)


def test_no_file_and_a_folder(tmp_path):
    with pytest.raises(UserError, match=r"hero\.png: expected a picture .*, found no such file"):
        read_picture(tmp_path / "hero.png")
    with pytest.raises(UserError, match=r"expected a picture .*, found a folder"):
        read_picture(tmp_path)


def test_a_picture_of_a_clips_size_stays_as_it_is():
    np.testing.assert_array_equal(fit_picture(Picture(noise()), height=32, width=48), noise())


def test_a_wide_picture_loses_its_sides():
    wide = np.zeros((32, 96, 3), np.uint8)
    wide[:, 24:72] = smooth()
    np.testing.assert_array_equal(fit_picture(Picture(wide), height=32, width=48), smooth())


def test_a_tall_picture_is_kept_whole_on_white_and_a_frame_is_cut():
    tall = np.zeros((64, 24, 3), np.uint8)
    fitted = fit_picture(Picture(tall), height=32, width=48)
    assert fitted.shape == (32, 48, 3)
    assert (fitted[:, 18:30] == 0).all()
    assert (fitted[:, :17] == 255).all()
    assert (fitted[:, 31:] == 255).all()
    cut = fit_picture(Picture(tall, is_video=True), height=32, width=48)
    assert (cut == 0).all()
