"""The characters: what a player's file may say, and what is refused in one line."""

import numpy as np
import pytest
from annotated_shots import write_characters
from PIL import Image

from animegamer_jax.data.characters import (
    NOBODY,
    open_picture,
    read_characters,
)
from animegamer_jax.errors import UserError
from animegamer_jax.vlm.fields import plain


def test_characters_are_read_with_its_pictures(tmp_path):
    characters = read_characters(write_characters(tmp_path))
    assert characters.names == ("Mika", "Ren")
    (digest,) = characters.entries[0].images
    picture = open_picture(characters.pictures[digest], name="mika", hint="")
    assert picture.size == (40, 60)
    assert picture.getpixel((3, 3)) == (200, 30, 30)
    for called in ("Mika", "mika", "MIKA THE CAT"):
        assert characters.resolve(called) == "Mika"
    assert [characters.resolve(nobody.title()) for nobody in NOBODY] == list(NOBODY)
    with pytest.raises(ValueError, match="expected one of: Mika, Ren, other, none; found 'Yuki'"):
        characters.resolve("Yuki")


def test_the_digest_is_that_of_names_and_pictures(tmp_path):
    file = write_characters(tmp_path)
    before = read_characters(file).digest
    assert read_characters(file).digest == before
    Image.new("RGB", (40, 60), (201, 30, 30)).save(tmp_path / "mika.png")
    other_picture = read_characters(file).digest
    file.write_text(file.read_text().replace("Mika the cat", "The cat"))
    assert len({before, other_picture, read_characters(file).digest}) == 3


def test_transparent_and_turned_pictures(tmp_path):
    pixels = np.zeros((4, 6, 4), np.uint8)
    pixels[:, 3:] = (10, 20, 30, 255)
    Image.fromarray(pixels).save(tmp_path / "half.png")
    picture = open_picture((tmp_path / "half.png").read_bytes(), name="half", hint="")
    assert picture.getpixel((0, 0)) == (255, 255, 255)
    assert picture.getpixel((5, 0)) == (10, 20, 30)
    exif = Image.Exif()
    exif[0x0112] = 6  # a camera held upright
    Image.new("RGB", (40, 20)).save(tmp_path / "turned.jpg", exif=exif)
    turned = open_picture((tmp_path / "turned.jpg").read_bytes(), name="turned", hint="")
    assert turned.size == (20, 40)


MIKA = '[[character]]\nname = "Mika"\nimages = ["mika.png"]\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"characters\.toml: no characters: expected one or more of \[\[character\]\]"),
        ("[[character]\n", r"characters\.toml: not valid TOML \(.*\): expected \[\[character\]\]"),
        ("character = []\n", "no characters"),
        ("character = [3]\n", "character 1: expected an object, found 3"),
        ('title = "x"\n' + MIKA, "unknown key 'title'"),
        (
            MIKA + 'picture = "mika.png"\n',
            "character 1: picture: unknown field: expected \\[\\[char",
        ),
        (
            '[[character]]\nimages = ["mika.png"]\n',
            "character 1: name: missing: expected \\[\\[char",
        ),
        (MIKA.replace('"Mika"', "3"), "character 1: name: expected a valid string, found 3"),
        (MIKA.replace("Mika", "Mi; ka"), "name: expected letters, .*, found ';'"),
        (MIKA.replace("Mika", "M" * 41), "name: expected at most 40 characters, found 41"),
        (MIKA.replace("Mika", "Other"), "name: 'Other' is reserved for clips without a char"),
        (
            MIKA.replace('["mika.png"]', "[]"),
            "character 1: images: expected one picture of Mika or more",
        ),
        (
            MIKA.replace('["mika.png"]', '"mika.png"'),
            "character 1: images: expected a valid array, found",
        ),
        (
            MIKA.replace("mika.png", "a\\u0000b"),
            r"expected a picture of Mika, found the path 'a\\x00b'",
        ),
        (
            MIKA + "aliases = [1]\n",
            r"character 1: aliases\[0\]: expected a valid string, found 1",
        ),
        (
            MIKA + "aliases = 2024-01-01\n",
            'aliases: expected a valid array, found {"date": "2024-01-01',
        ),
        (MIKA + 'aliases = ["<img>"]\n', "character 1: aliases: expected letters, .*, found '<'"),
        (MIKA.replace("mika.png", "absent.png"), r"absent\.png: cannot be read: No such file"),
        (
            MIKA.replace("mika.png", "characters.toml"),
            r"characters\.toml: not an image \(.*\): expected a picture",
        ),
        (
            MIKA.replace("mika.png", "cut.png"),
            r"cut\.png: not an image \(.*\): expected a picture of",
        ),
        (MIKA + MIKA.replace("Mika", "mika"), "mika: name or alias of Mika and again of mika"),
        (MIKA + MIKA.replace("Mika", "Ren") + 'aliases = ["MIKA"]', "MIKA: name or alias of Mi"),
        (MIKA + 'aliases = ["Mi", "mi"]\n', "mi: name or alias of Mika and again of Mika"),
    ],
)
def test_files_that_are_refused(tmp_path, text, message):
    file = write_characters(tmp_path)
    (tmp_path / "cut.png").write_bytes((tmp_path / "mika.png").read_bytes()[:60])
    file.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        read_characters(file)
    assert "\n" not in str(caught.value)


def test_no_file_and_no_text(tmp_path):
    with pytest.raises(UserError, match=r"absent\.toml: cannot be read: No such file"):
        read_characters(tmp_path / "absent.toml")
    (tmp_path / "characters.toml").write_bytes(b'[[character]]\nname = "\xff"')
    with pytest.raises(UserError, match="expected UTF-8 text, found byte 0xff at offset 22"):
        read_characters(tmp_path / "characters.toml")


def test_a_picture_beyond_all_measure(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(UserError, match=r"mika\.png: expected a picture of at most 50 million"):
        read_characters(write_characters(tmp_path))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("  riding\n a\tbicycle. ", "riding a bicycle"),
        ("Dr. Nori & Co", "Dr. Nori & Co"),
        ("the cat\u2019s paw", "the cat's paw"),
        ("\uff52\uff55\uff4e", "run"),
        ("走る", "走る"),
        ("café", "café"),
    ],
)
def test_texts_are_cleaned(text, expected):
    assert plain(text, most=20) == expected


@pytest.mark.parametrize(
    "text",
    ["", " . ", "../../x", "a;b", "a\uff1bb", "a: b", "<img>", "run\x00", "run\x1b[2J", "run 🏃",
     "a\u202eb", "a\u200bb", "\ud800", "{x}", "a\\b", "'-'", "x" * 21, "ﷺ" * 2],
)  # fmt: skip
def test_texts_that_are_refused(text):
    with pytest.raises(ValueError, match=r"^expected "):
        plain(text, most=20)
