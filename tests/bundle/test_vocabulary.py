"""The words that a bundle lists, and the files that go with a tokenizer."""

import pytest
from etils import epath

from animegamer_jax.bundle.bundle import Bundle, BundleWriter
from animegamer_jax.bundle.embedded import ASSETS
from animegamer_jax.bundle.vocabulary import Vocabulary, local_tokenizer, read_vocabulary
from animegamer_jax.errors import UserError
from animegamer_jax.play.terminal import introduce
from animegamer_jax.protocol import PAPER
from animegamer_jax.toy.vocabulary import vocabulary, write_tokenizer


def test_the_embedded_bundle_lists_the_toy_worlds_words(tmp_path):
    words = Bundle.open(ASSETS / "toy").vocabulary
    assert words == vocabulary()
    assert {"waving", "talking to Mika"} <= set(words.motions)
    written = write_tokenizer(tmp_path)
    for file in (written / "tokenizer.json", tmp_path / "words.json"):
        assert (ASSETS / "toy" / file.relative_to(tmp_path)).read_bytes() == file.read_bytes()


def test_words_are_optional_and_read_strictly(tmp_path):
    folder = epath.Path(tmp_path)
    assert read_vocabulary(folder) == Vocabulary()
    (folder / "words.json").write_text('{"characters": ["Qiqi"]}')
    assert read_vocabulary(folder) == Vocabulary(characters=("Qiqi",))
    for wrong in ("[]", "{", '{"names": []}', '{"places": [1]}', '{"places": "beach"}'):
        (folder / "words.json").write_text(wrong)
        with pytest.raises(UserError, match=r"words\.json"):
            read_vocabulary(folder)


def test_words_go_where_the_tokenizer_goes(tmp_path):
    source = write_tokenizer(tmp_path / "set")
    with BundleWriter(tmp_path / "bundle", name="b", protocol=PAPER) as writer:
        writer.write_tokenizer(source)
    bundle = Bundle.open(tmp_path / "bundle")
    assert bundle.vocabulary == vocabulary()
    assert (bundle.tokenizer_dir / "tokenizer.json").is_file()
    with pytest.raises(UserError, match="no tokenizer/ there: make it"):
        local_tokenizer(epath.Path(tmp_path), hint="make it")


def test_the_prompt_offers_the_words():
    assert "Mika" not in introduce(Vocabulary())
    assert introduce(Vocabulary()).count("\n") == 0
    shown = introduce(vocabulary())
    assert "'Mika is gently waving in the town by day.' then 'Go on, faster.'" in shown
    assert "Characters: Mika, Ren" in shown
    assert "Times: day, night." in shown
