"""The tokenizer of whole words: its ids, what it does not know, and rows for T5 and CLIP."""

import pytest

from animegamer_jax.errors import UserError
from animegamer_jax.protocol import SPECIAL_TOKENS
from animegamer_jax.tokenizer import Tokenizer, write_word_tokenizer

WORDS = ("mika", "waves", "gently", "at", "night", "mika")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("words")


@pytest.fixture(scope="module")
def tokenizer(folder) -> Tokenizer:
    size = write_word_tokenizer(folder, WORDS, num_frame_tokens=24)
    return Tokenizer.load(folder, vocab_size=size, num_queries=24)


def test_ids_lie_where_the_networks_expect_them(folder, tokenizer):
    first = ("<pad>", "<unk>", "<s>", "<mask>", "</s>")
    assert [tokenizer.id_of(token) for token in first] == [0, 1, 2, 3, 4]
    assert tokenizer.ids.bos == 2
    assert tokenizer.id_of("<end>") == len(tokenizer) - 1
    words = [tokenizer.id_of(word) for word in WORDS[:5]]
    assert words == list(range(words[0], words[0] + 5))
    game = {*tokenizer.ids.special.values(), *tokenizer.ids.frames}
    assert len(game) == len(SPECIAL_TOKENS) + 24
    assert max(words) < min(game)
    assert max(game) < tokenizer.id_of("<end>")
    again = folder / "again"
    assert write_word_tokenizer(again, WORDS, num_frame_tokens=24) == len(tokenizer)
    assert (again / "tokenizer.json").read_text() == (folder / "tokenizer.json").read_text()


def test_capitals_spaces_and_marks(tokenizer):
    mika, waves, night = (tokenizer.id_of(word) for word in ("mika", "waves", "night"))
    mark = {m: tokenizer.id_of(m) for m in ":;."}
    assert tokenizer.encode("Mika:  WAVES;\nnight.") == [
        *(mika, mark[":"], waves, mark[";"], night, mark["."])
    ]
    ids, length = tokenizer.caption("Mika waves", 4)
    assert (ids.tolist(), length) == ([mika, waves, 0, 0], 2)


def test_rows_for_t5_and_clip(tokenizer):
    mika, waves, end = (tokenizer.id_of(word) for word in ("mika", "waves", "<end>"))
    assert tokenizer.padded("mika waves", 4).tolist() == [mika, waves, 0, 0]
    assert tokenizer.padded("mika waves", 1).tolist() == [mika]
    assert tokenizer.padded("", 3).tolist() == [0, 0, 0]
    assert tokenizer.padded_with_end("mika waves", 4).tolist() == [mika, waves, end, 0]
    cut = tokenizer.padded_with_end("mika waves", 2)
    assert cut.tolist() == [mika, end]
    assert cut.argmax() == 1


def test_unknown_words_are_reported_as_the_player_wrote_them(tokenizer):
    assert tokenizer.unknown_words("Mika waves at night.") == ()
    assert tokenizer.unknown_words("Dragons wave; mika & dragons' <img> Dragons") == (
        *("Dragons", "wave", "&", "dragons", "<", "img", ">"),
    )
    ids = tokenizer.encode("mika <img> 7")
    assert not set(ids) & {*tokenizer.ids.special.values(), *tokenizer.ids.frames}
    assert ids.count(tokenizer.id_of("<unk>")) == 4


def test_a_tokenizer_of_letters_knows_every_word_and_has_no_end(tmp_path):
    from helpers import write_tokenizer

    write_tokenizer(tmp_path)
    letters = Tokenizer.load(tmp_path)
    assert letters.unknown_words("dragons") == ()
    with pytest.raises(UserError, match=r"no <end> in it: use a tokenizer of whole words"):
        letters.padded_with_end("dragons", 8)


@pytest.mark.parametrize("word", ["Mika", "two words", "broom-stick", ""])
def test_what_is_no_word(tmp_path, word):
    with pytest.raises(ValueError, match="expected one lower-case word"):
        write_word_tokenizer(tmp_path, ["mika", word])
