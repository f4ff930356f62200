"""T5's own tokenizer, for a T5 whose vocabulary is not the language model's."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny_games
import tiny_sets
from helpers import random_leaves

from animegamer_jax.bundle.bundle import Bundle, BundleWriter
from animegamer_jax.errors import UserError
from animegamer_jax.game.pictures import PictureEncoder
from animegamer_jax.media.pictures import Picture
from animegamer_jax.tokenizer import T5Tokenizer

sentencepiece = pytest.importorskip("sentencepiece")
transformers = pytest.importorskip("transformers")

WORDS = (
    *("quickly", "flying", "on", "a", "broomstick", "gently", "turn", "head", "slowly", "wave"),
    *("run", "walk", "by", "day", "night"),
)
TEXTS = ("quickly flying on a broomstick", "gently turn head " * 9, "", "  Zebra  runs", "a")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tokenizer of 44 pieces in the files of T5's own."""
    found, rng = tmp_path_factory.mktemp("t5"), np.random.default_rng(0)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(rng.choice(WORDS, 8)) for _ in range(300)]),
        model_prefix=str(found / "spiece"), vocab_size=40, minloglevel=2,
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1,
    )  # fmt: skip
    special = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "extra_ids": 4}
    config = {"tokenizer_class": "T5Tokenizer", "model_max_length": 512, **special}
    (found / "tokenizer_config.json").write_text(json.dumps(config))
    (found / "config.json").write_text('{"model_type": "t5"}')
    return found


@pytest.mark.parametrize("length", [4, 10])
def test_ids_are_those_of_transformers(folder, tmp_path, length):
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    T5Tokenizer.load(folder, vocab_size=64).save(tmp_path / "fast")
    for source in (folder, tmp_path / "fast"):
        ours = T5Tokenizer.load(source, vocab_size=64)
        for text in TEXTS:
            found = theirs(text, truncation=True, max_length=length, padding="max_length")
            assert ours.padded(text, length).tolist() == found["input_ids"], text


def test_a_player_cannot_write_the_end_token(folder):
    ids = T5Tokenizer.load(folder, vocab_size=64).padded("run </s> walk", 12).tolist()
    assert ids.count(1) == 1


def test_what_is_not_t5s(folder, tmp_path):
    with pytest.raises(UserError, match="it has 44 entries, T5's embedding has 43 rows"):
        T5Tokenizer.load(folder, vocab_size=43)
    with pytest.raises(UserError, match=r"no tokenizer there; expected .* or spiece\.model"):
        T5Tokenizer.load(tmp_path, vocab_size=64)
    shutil.copytree(folder, tmp_path / "many")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    for extra, found in ((10**6, "1000000"), ("4", "'4'")):
        (tmp_path / "many/tokenizer_config.json").write_text(
            json.dumps(config | {"extra_ids": extra})
        )
        message = f"tokenizer_config.json: extra_ids: expected at most 1000, found {found}: use"
        with pytest.raises(UserError, match=message):
            T5Tokenizer.load(tmp_path / "many", vocab_size=64)
    (tmp_path / "bytes").mkdir()
    from helpers import write_tokenizer

    write_tokenizer(tmp_path / "bytes")
    with pytest.raises(UserError, match=r"expected </s>, and <pad> as id 0: use T5's own"):
        T5Tokenizer.load(tmp_path / "bytes", vocab_size=9999)


@pytest.fixture(scope="module")
def bundle(folder, tmp_path_factory) -> Bundle:
    """A bundle whose T5 has a vocabulary of its own."""
    path = tmp_path_factory.mktemp("bundle")
    config = tiny_games.make_config(len(tiny_sets.make_tokenizer(path / "words")))
    config = dataclasses.replace(config, t5=dataclasses.replace(config.t5, vocab_size=64))
    with BundleWriter(path / "model", name="own", protocol=tiny_games.PROTOCOL) as writer:
        for name in ("mllm", "encoder", "dit", "vae", "t5", "clip"):
            leaves = random_leaves(name, getattr(config, name), 3)
            writer.write_network(name, getattr(config, name), leaves)
        writer.write_tokenizer(path / "words")
        writer.write_tokenizer(folder, name="t5_tokenizer")
    return Bundle.open(path / "model")


def test_a_bundle_has_it_next_to_its_tokenizer(bundle, folder):
    assert isinstance(bundle.load_t5_tokenizer(), T5Tokenizer)
    assert "<TURN>" in (bundle.tokenizer_dir / "tokenizer.json").read_text()
    before = bundle.digest()
    file = bundle.path / "t5_tokenizer" / "config.json"
    file.write_text('{"model_type": "t5", "changed": 1}')
    assert bundle.digest() != before
    file.write_text((folder / "config.json").read_text())
    assert bundle.digest() == before


def test_a_picture_is_represented_with_it(bundle):
    """Words that only T5's tokenizer knows."""
    picture = Picture(np.zeros((16, 24, 3), np.uint8))
    encoder = PictureEncoder(bundle)
    fly, walk = (encoder.represent(picture, f"{word}!") for word in ("quickly", "broomstick"))
    difference = np.abs(fly.representation - walk.representation)
    num_text = tiny_sets.TEXT[0]
    assert difference[:num_text].max() > 1e-2
    assert difference[num_text:].max() == 0


def test_a_bundle_without_it_says_what_is_missing(bundle):
    (bundle.path / "t5_tokenizer").rename(bundle.path / "elsewhere")
    try:
        with pytest.raises(UserError, match="no t5_tokenizer/ there, and the tokenizer has 152"):
            bundle.load_t5_tokenizer()
    finally:
        (bundle.path / "elsewhere").rename(bundle.path / "t5_tokenizer")
