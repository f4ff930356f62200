"""CLIP for scores: embeddings of frames and captions as transformers makes them from one model."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tiny_clip import TINY, make_transformers_clip, openclip_tensors

from animegamer_jax.bundle.embedded import model_folder
from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.metrics.clip_embedder import ClipEmbedder
from animegamer_jax.evaluate.metrics.formulas import clip_image_similarity, clip_text_similarity
from animegamer_jax.evaluate.metrics.openclip import BytePairTokenizer, load_clip_for_scores
from animegamer_jax.toy.world import make_game

torch = pytest.importorskip("torch")

TEXTS = ["Mika walks quickly, at night", "the beach", "a  Meadow: 3 o'clock <|endoftext|> x" * 3]
TOY = model_folder("toy")


def write_tokenizer(folder: Path) -> int:
    """Letters, and a few merges: small, but CLIP's own kind of tokenizer."""
    import transformers

    letters = list("abcdefghijklmnopqrstuvwxyz0123456789:,.;'|<>")
    merges = [("t", "h"), ("th", "e</w>"), ("e", "a"), ("b", "ea")]
    entries = [*letters, *(f"{letter}</w>" for letter in letters)]
    entries += ["".join(pair) for pair in merges]
    entries += ["<|startoftext|>", "<|endoftext|>"]
    vocab = {entry: number for number, entry in enumerate(entries)}
    tokenizer = transformers.CLIPTokenizer(vocab=vocab, merges=merges)
    tokenizer.save_pretrained(folder)
    assert len(tokenizer) == len(vocab)
    return len(vocab)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A tiny random CLIPModel of transformers, and its folder as OpenCLIP would lay it out."""
    folder = tmp_path_factory.mktemp("openclip")
    vocab_size = write_tokenizer(folder)
    config = dataclasses.replace(TINY, vocab_size=vocab_size, context_length=24)
    model = make_transformers_clip(config)
    weights = openclip_tensors(model, config)
    tensors = {name: torch.from_numpy(x.copy()) for name, x in weights.items()}
    torch.save(tensors, folder / "open_clip_pytorch_model.bin")
    return model, folder


@pytest.fixture(scope="module")
def embedder(theirs) -> ClipEmbedder:
    return load_clip_for_scores(theirs[1], head_width=8, batch_size=2)


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def pooled(output) -> np.ndarray:
    """transformers 5 wraps what version 4 returned bare."""
    return getattr(output, "pooler_output", output).detach().numpy()


def test_captions_are_embedded_as_transformers_does(theirs, embedder):
    import transformers

    model, folder = theirs
    tokenizer = transformers.CLIPTokenizer.from_pretrained(str(folder), local_files_only=True)
    plain = [text.replace("<|", "< |") for text in TEXTS]
    tokens = tokenizer(
        plain, padding="max_length", truncation=True, max_length=24, return_tensors="pt"
    )
    ids = np.stack([embedder.tokenizer.padded_with_end(text, 24) for text in TEXTS])
    ends = tokens["input_ids"].numpy() == tokenizer.eos_token_id
    until = ends.cumsum(1) - ends == 0  # what stands up to the end token; then padding differs
    np.testing.assert_array_equal(ids[until], tokens["input_ids"].numpy()[until])
    assert (ids[~until] == 0).all()
    assert (ids == tokenizer.eos_token_id).sum(1).tolist() == [1, 1, 1]
    assert ids[2, -1] == tokenizer.eos_token_id  # cut, and ended all the same
    with torch.no_grad():
        expected = unit(pooled(model.get_text_features(**tokens)))
    found = embedder.texts(TEXTS)
    assert np.abs(found - expected).max() < 1e-5


def test_frames_are_embedded_as_transformers_does(theirs, embedder):
    """From the same pixels on: the frames have the tower's size, so nothing is resized."""
    clips = np.random.default_rng(0).integers(0, 256, (2, 3, 24, 24, 3)).astype(np.uint8)
    mean = np.array([0.48145466, 0.4578275, 0.40821073])
    std = np.array([0.26862954, 0.26130258, 0.27577711])
    pixels = ((clips / 255 - mean) / std).reshape(-1, 24, 24, 3).transpose(0, 3, 1, 2)
    with torch.no_grad():
        expected = pooled(theirs[0].get_image_features(torch.from_numpy(pixels).float()))
    expected = unit(expected).reshape(2, 3, -1)
    found = embedder.frames(clips)
    assert np.abs(found - expected).max() < 1e-5
    # And so are the scores that are made of them.
    scores = np.asarray(clip_image_similarity(found, found[::-1]))
    np.testing.assert_allclose(scores, (expected * expected[::-1]).sum(-1).mean(-1), atol=1e-5)
    texts = embedder.texts(TEXTS[:2])
    scores = np.asarray(clip_text_similarity(found, texts))
    np.testing.assert_allclose(scores, (expected @ texts[..., None]).mean((1, 2)), atol=1e-5)


@pytest.mark.parametrize("prefix", ["", "module.", "clip_img_encoder.model."])
def test_a_file_alone_embeds_frames_only(theirs, embedder, tmp_path, prefix):
    tensors = torch.load(theirs[1] / "open_clip_pytorch_model.bin", weights_only=True)
    state = {prefix + name: tensor for name, tensor in tensors.items()}
    torch.save({"state_dict": state} if prefix == "module." else state, tmp_path / "clip.pt")
    alone = load_clip_for_scores(tmp_path / "clip.pt", head_width=8, batch_size=2)
    clips = np.zeros((1, 2, 24, 24, 3), np.uint8)
    np.testing.assert_array_equal(alone.frames(clips), embedder.frames(clips))
    with pytest.raises(UserError, match="texts cannot be embedded without its tokenizer"):
        alone.texts(["the beach"])
    found = load_clip_for_scores(
        tmp_path / "clip.pt", tokenizer=theirs[1], head_width=8, batch_size=2
    )
    np.testing.assert_array_equal(found.texts(TEXTS), embedder.texts(TEXTS))


def test_sizes_of_heads_come_from_openclips_own_file(theirs, embedder, tmp_path):
    shutil.copytree(theirs[1], tmp_path / "model")
    vision, text = {"width": 32, "head_width": 8}, {"width": 16, "heads": 2}
    content = {"model_cfg": {"embed_dim": 20, "vision_cfg": vision, "text_cfg": text}}
    file = tmp_path / "model" / "open_clip_config.json"
    file.write_text(json.dumps(content))
    found = load_clip_for_scores(tmp_path / "model", batch_size=2)
    assert found.clip.config == embedder.clip.config
    content["model_cfg"]["quick_gelu"] = True
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match="sets the quick GELU"):
        load_clip_for_scores(tmp_path / "model")
    file.write_text("{}")
    with pytest.raises(UserError, match=r"expected OpenCLIP's JSON with `model_cfg`"):
        load_clip_for_scores(tmp_path / "model")


def test_a_bundle_scores_with_its_own_clip_and_words():
    toy = load_clip_for_scores(TOY)
    turns = make_game(0, num_turns=3)
    texts = toy.texts([turn.caption for turn in turns])
    assert texts.shape == (3, toy.clip.config.embed_size)
    assert str(toy.clip.config.param_dtype) == "float32"


def test_what_cannot_be_used_is_refused_in_one_line(theirs, tmp_path, tiny_bundle):
    model, folder = theirs
    with pytest.raises(UserError, match="gone: no such file or folder: expected a bundle or an"):
        load_clip_for_scores(tmp_path / "gone")
    with pytest.raises(UserError, match="no network clip in this bundle"):
        load_clip_for_scores(tiny_bundle)
    with pytest.raises(UserError, match="width is 32: expected a head width that divides it"):
        load_clip_for_scores(folder)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text('{"model_type": "clip"}')
    with pytest.raises(UserError, match="in transformers' names: expected OpenCLIP's own file"):
        load_clip_for_scores(tmp_path)
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match="expected one of model"):
        load_clip_for_scores(tmp_path / "none")
    with pytest.raises(UserError, match="no tokenizer: expected CLIP's tokenizer"):
        load_clip_for_scores(folder, tokenizer=tmp_path, head_width=8)
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    content = json.loads((other / "tokenizer.json").read_text())
    content["model"]["vocab"]["zz"] = len(content["model"]["vocab"])
    (other / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="expected the tokenizer that belongs to it"):
        load_clip_for_scores(folder, tokenizer=other, head_width=8)
    (other / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="the tokenizer cannot be read"):
        BytePairTokenizer(other)
