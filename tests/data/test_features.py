"""Features of a games set: those of the networks, whole, and refused where they must be."""

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flags import xla_flags
from flax import nnx
from helpers import random_leaves
from tiny_sets import CONFIG, PROTOCOL, frames_of, make_tokenizer, turns_of, write_games

from animegamer_jax.bundle.bundle import Bundle, BundleWriter
from animegamer_jax.cli import main
from animegamer_jax.configs import ShotEncoderConfig
from animegamer_jax.data import command
from animegamer_jax.data import features as features_module
from animegamer_jax.data.datasets import open_features, open_games
from animegamer_jax.data.features import FeatureMaker, encode_clips, shown_frame, write_features
from animegamer_jax.data.samples import check_features
from animegamer_jax.distributed import HostOptions
from animegamer_jax.errors import UserError
from animegamer_jax.models.encoder import ShotEncoder, ShotNetworks, encode_frames, encode_shots
from animegamer_jax.tokenizer import Tokenizer

WRITTEN = list(turns_of(2))
NUM_TEXT_TOKENS = 3
FLOAT16 = {"rtol": 1e-3, "atol": 1e-4}  # its last place, and the products of another batch size


def write_bundle(path, *, networks=("t5", "clip", "vae"), config=CONFIG, key=0):
    tokenizer = path.parent / f"{path.name}-tokenizer"
    size = len(make_tokenizer(tokenizer))
    assert size == CONFIG.t5.vocab_size == CONFIG.clip.vocab_size
    with BundleWriter(path, name="tiny", protocol=PROTOCOL) as writer:
        for name in networks:
            network = getattr(config, name)
            writer.write_network(name, network, random_leaves(name, network, key))
        writer.write_tokenizer(tokenizer)
    return path


@pytest.fixture(scope="module")
def games_path(tmp_path_factory):
    return write_games(tmp_path_factory.mktemp("sets") / "games", {"train": 2, "test": 1})


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return Bundle.open(write_bundle(tmp_path_factory.mktemp("bundles") / "tiny"))


@pytest.fixture(scope="module")
def networks(bundle):
    return {name: bundle.load(name) for name in ("t5", "clip", "vae")}


@pytest.fixture(scope="module")
def reported():
    return []


@pytest.fixture(scope="module")
def features(games_path, bundle, tmp_path_factory, reported):
    path = tmp_path_factory.mktemp("sets") / "features"
    write_features(
        path,
        bundle=bundle,
        games=open_games(games_path),
        num_text_tokens=NUM_TEXT_TOKENS,
        batch_size=8,
        shard_size=6,  # ten turns are a shard and two thirds
        on_progress=lambda *progress: reported.append(progress),
    )
    return open_features(path)


def test_the_set_says_what_it_holds(features, games_path, reported):
    assert features.info.splits == {"train": 10, "test": 5}
    has = features.features
    assert (has.bundle, has.frame) == ("tiny", "first")
    assert (has.text, has.image, has.moments) == ((3, 12), (4, 20), (3, 4, 6, 8))
    check_features(features, CONFIG)
    games = open_games(games_path)
    assert dataclasses.replace(
        features.info, kind="games", made_by="a test", features=None
    ) == dataclasses.replace(games.info)
    assert reported == [("train turns", n, 10) for n in range(11)] + [
        ("test turns", n, 5) for n in range(6)
    ]


@jax.jit
def see(clip, frames):
    return clip.image_features(clip.preprocess(frames.astype(jnp.float32) / 127.5 - 1))


@jax.jit
def encode(vae, clips):
    return vae.encode(clips.astype(jnp.float32) / 127.5 - 1)


def test_features_equal_the_networks_answers(features, bundle, networks):
    t5, clip, vae = networks.values()
    tokenizer = Tokenizer.load(bundle.tokenizer_dir, num_queries=1)
    clips = np.stack([frames_of(turn) for turn in WRITTEN])
    texts = [tokenizer.padded(turn["motion_text"], NUM_TEXT_TOKENS) for turn in WRITTEN]
    expected = {
        "text_features": jax.jit(lambda t5, tokens: t5(tokens))(t5, np.stack(texts)),
        "image_features": see(clip, clips[:, 0]),
    }
    turns = features.turns("train")
    for name, values in expected.items():
        stored = np.stack([turns[k][name] for k in range(10)])
        np.testing.assert_allclose(stored, np.asarray(values), **FLOAT16, err_msg=name)
    moments = np.stack([features.latents("train")[k]["moments"] for k in range(10)])
    assert moments.dtype == np.float16
    np.testing.assert_allclose(moments, np.asarray(encode(vae, clips)), **FLOAT16)
    # Turns differ, so that a mixed-up order would show.
    assert len({row.tobytes() for row in moments}) == 10


def test_a_shot_is_encoded_from_its_picture_as_from_its_features(features, networks):
    """E_a of pictures and texts, as training computes it from the stored features."""
    turns = [features.turns("train")[k] for k in range(10)]
    text, image = (
        np.stack([turn[name] for turn in turns]).astype(np.float32)
        for name in ("text_features", "image_features")
    )
    encoder = ShotEncoder(
        ShotEncoderConfig(
            num_text_tokens=text.shape[1],
            num_image_tokens=image.shape[1],
            text_size=text.shape[2],
            image_size=image.shape[2],
            representation_size=16,
        ),
        rngs=nnx.Rngs(5),
    )
    frames = np.stack([frames_of(turn)[0] for turn in WRITTEN])
    shot = ShotNetworks(networks["clip"], encoder)
    expected = np.asarray(jax.jit(lambda encoder, *x: encoder(*x))(encoder, text, image))
    found = np.asarray(jax.jit(encode_shots)(shot, frames, text))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-2)
    assert np.abs(expected - expected[::-1]).max() > 0.5  # frames differ
    split = text.shape[1]
    tokens = np.asarray(jax.jit(encode_frames)(shot, frames))
    np.testing.assert_allclose(tokens, found[:, split:], atol=1e-5)
    untold, empty = jax.jit(encode_shots)(shot, frames), encoder.unconditional()
    for row in np.asarray(untold):
        np.testing.assert_allclose(row[:split], empty[:split], atol=1e-5)
    np.testing.assert_allclose(untold[:, split:], tokens, atol=1e-5)


def test_the_turns_are_those_of_the_games_set(features, games_path):
    for split in ("train", "test"):
        turns, games = features.turns(split), open_games(games_path).turns(split)
        for number in range(len(games)):
            record, expected = turns[number], games[number]
            del expected["clip"]
            assert {name: record[name] for name in expected} == expected


def test_a_random_frame_is_the_turns_own(games_path, bundle, networks, tmp_path, capsys):
    out = tmp_path / "features"
    assert (
        command.features(
            model=str(bundle.path),
            data=str(games_path),
            out=str(out),
            frame="random",
            batch=8,
            host_options=HostOptions(),
        )
        == 0
    )
    assert f"{out}: features of 15 turns (train 10, test 5)" in capsys.readouterr().out
    features = open_features(out)
    assert features.features.frame == "random"
    assert features.features.text[0] == 8  # the toy size's, because the bundle has no encoder
    shown = [shown_frame(turn, num_frames=9, frame="random") for turn in WRITTEN]
    assert len(set(shown)) > 3
    frames = np.stack([frames_of(turn)[k] for turn, k in zip(WRITTEN, shown, strict=True)])
    stored = np.stack([features.turns("train")[k]["image_features"] for k in range(10)])
    np.testing.assert_allclose(stored, np.asarray(see(networks["clip"], frames)), **FLOAT16)


# Stopped, resumed, shared out


def records_of(path) -> list[bytes]:
    """All arrays of a features set, in order."""
    found = open_features(path)
    return [
        record[name].tobytes()
        for split, count in found.info.splits.items()
        for source, names in (
            (found.turns(split), ("text_features", "image_features")),
            (found.latents(split), ("moments",)),
        )
        for record in (source[k] for k in range(count))
        for name in names
    ]


def shards_of(path) -> dict[str, int]:
    return {str(f.relative_to(path)): f.stat().st_mtime_ns for f in path.rglob("*array_record*")}


def test_the_same_call_goes_on_after_a_stop(features, games_path, bundle, tmp_path):
    path = tmp_path / "features"
    options = {"bundle": bundle, "games": open_games(games_path), "num_text_tokens": 3}
    options |= {"batch_size": 8, "shard_size": 6}

    def stop(split, done, total):
        if (split, done) == ("train turns", 10):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_features(path, **options, on_progress=stop)
    with pytest.raises(UserError, match=r"features: not finished: run the command that began it"):
        open_features(path)
    with pytest.raises(
        UserError, match=r"another dataset was begun here: set.features.frame was 'first', is 'rand"
    ):
        write_features(path, **options, frame="random")
    # Of seven turns a shard there are as many shards, of other turns.
    with pytest.raises(
        UserError,
        match=r"begun here: fingerprint\.shard_size was 6, is 7: use the earlier",
    ):
        write_features(path, **options | {"shard_size": 7})
    before = shards_of(path)
    assert len(before) == 4  # two shards of two parts
    reported = []
    write_features(path, **options, on_progress=lambda *progress: reported.append(progress))
    assert reported == [("train turns", 10, 10), *(("test turns", n, 5) for n in range(6))]
    after = shards_of(path)
    assert len(after) == 6
    assert before.items() <= after.items()  # not written again
    assert records_of(path) == records_of(features.path)
    assert {p.name for p in path.iterdir()} == {"set.json", "conditions", "latents"}


def copied(source, folder):
    """A set or bundle again, where the first was."""
    shutil.copytree(source, folder / source.name, dirs_exist_ok=True)
    return folder / source.name


@pytest.mark.parametrize("other", ["games", "weights", "tokenizer"])
def test_a_set_that_was_begun_from_others_is_not_gone_on_with(
    games_path, bundle, tmp_path, monkeypatch, other
):
    """The turns of a games set that was made again may have the same number."""
    monkeypatch.setattr(features_module.FeatureMaker, "records", stop_at_once)
    games, model = copied(games_path, tmp_path), copied(bundle.path, tmp_path)
    path = tmp_path / "features"

    def go_on():
        found = {"bundle": Bundle.open(model), "games": open_games(games)}
        write_features(path, **found, num_text_tokens=3, batch_size=8)

    with pytest.raises(KeyboardInterrupt):
        go_on()
    with pytest.raises(KeyboardInterrupt):  # the same
        go_on()
    if other == "games":
        shard = next(games.rglob("*train.array_record*"))
        content = bytearray(shard.read_bytes())
        content[1000] ^= 1
        shard.write_bytes(content)
    elif other == "weights":
        shutil.rmtree(model)
        write_bundle(model, key=1)
    else:
        (model / "tokenizer" / "more.json").write_text("{}")
    changed = {"games": "games.records", "weights": "bundle.t5", "tokenizer": "bundle.tokenizer"}
    with pytest.raises(UserError, match="another dataset was begun here") as caught:
        go_on()
    assert f"fingerprint.{changed[other]} was" in str(caught.value)


def stop_at_once(maker, turns, info):
    raise KeyboardInterrupt


HOST = """
import json, sys
from animegamer_jax.data.shards import ShardedDataset
from animegamer_jax.cli import main
from animegamer_jax.configs import ShotEncoderConfig

write = ShardedDataset.write

def tell(self, split, shard, records, **options):
    print("wrote", split, shard, flush=True)
    return write(self, split, shard, records, **options)

ShardedDataset.write = tell
sys.exit(main(json.loads(sys.argv[1])))
"""


def start_hosts(*commands: list[str]) -> list[subprocess.CompletedProcess]:
    """Runs the command of each host, with two devices each."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment["XLA_FLAGS"] = xla_flags(2)
    reported = ["--coordinator", f"localhost:{port}", "--hosts", str(len(commands)), "--host"]
    hosts = [
        subprocess.Popen(
            [sys.executable, "-c", HOST, json.dumps([*words, *reported, str(host)])],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host, words in enumerate(commands)
    ]
    found = [host.communicate(timeout=240) for host in hosts]
    return [
        subprocess.CompletedProcess(host.args, host.returncode, *texts)
        for host, texts in zip(hosts, found, strict=True)
    ]


@pytest.mark.slow
def test_two_hosts_with_two_devices_each_share_the_shards(games_path, bundle, tmp_path):
    words = ["data", "features", "--model", str(bundle.path), "--data", str(games_path), "--out"]
    assert main([*words, str(tmp_path / "alone"), "--batch", "8"]) == 0
    path = tmp_path / "features"
    command = [*words, str(path), "--batch", "4", "--shard", "3"]
    done = start_hosts(command, command)
    assert [host.returncode for host in done] == [0, 0], done[0].stderr + done[1].stderr
    written = [[line for line in d.stdout.split("\n") if line[:5] == "wrote"] for d in done]
    assert written == [
        ["wrote train 0", "wrote train 2", "wrote test 0"],
        ["wrote train 1", "wrote train 3", "wrote test 1"],
    ]
    assert f"{path}: features of 15 turns (train 10, test 5)" in done[0].stdout
    assert "features of" not in done[1].stdout
    assert open_features(path).info.splits == {"train": 10, "test": 5}
    for shared, alone in zip(records_of(path), records_of(tmp_path / "alone"), strict=True):
        pair = (np.frombuffer(side, np.float16) for side in (shared, alone))
        np.testing.assert_allclose(*pair, **FLOAT16)


@pytest.mark.slow
def test_a_mistake_of_one_host_stops_both(games_path, bundle, tmp_path):
    words = ["data", "features", "--model", str(bundle.path), "--data", str(games_path)]
    words += ["--out", str(tmp_path / "features"), "--shard", "3", "--batch"]
    done = start_hosts([*words, "4"], [*words, "3"])
    assert [host.returncode for host in done] == [2, 2]
    assert "host 1: batch 3: expected a multiple of this host's 2 devices" in done[0].stderr
    assert "features: batch 3: expected a multiple" in done[1].stderr
    differ = start_hosts([*words, "4"], [*words, "4", "--frame", "random"])
    assert [host.returncode for host in differ] == [2, 2]
    assert all("host 1 and host 0 differ in frame" in d.stderr for d in differ)


# What cannot be


def refusal(path, **changes) -> str:
    options = {"num_text_tokens": NUM_TEXT_TOKENS, "batch_size": 8, **changes}
    with pytest.raises(UserError) as caught:
        write_features(path, **options)
    assert "\n" not in str(caught.value)
    assert not path.exists()
    return str(caught.value)


def test_a_bundle_without_a_network(games_path, tmp_path):
    path = write_bundle(tmp_path / "lacking", networks=("t5", "vae"))
    message = refusal(tmp_path / "f", bundle=Bundle.open(path), games=open_games(games_path))
    assert "no network clip in this bundle: it has vae, t5" in message


def test_a_bundle_of_another_vocabulary(games_path, tmp_path):
    t5 = dataclasses.replace(CONFIG.t5, vocab_size=50)
    path = write_bundle(
        tmp_path / "other", networks=("t5",), config=dataclasses.replace(CONFIG, t5=t5)
    )
    message = refusal(tmp_path / "f", bundle=Bundle.open(path), games=open_games(games_path))
    assert "the tokenizer has 152 entries, T5's embedding 50 rows" in message


def test_features_that_are_not_finite(games_path, bundle, networks):
    games = open_games(games_path)
    tokenizer = Tokenizer.load(bundle.tokenizer_dir, num_queries=1)
    broken = {name: nnx.clone(network) for name, network in networks.items()}
    maker = FeatureMaker(**broken, tokenizer=tokenizer, num_text_tokens=3, batch_size=4)
    t5, vae = broken["t5"], broken["vae"]
    large = jnp.full_like(t5.final_norm.scale[...], 1e6)  # float16 ends at 65,504
    t5.final_norm.scale.set_value(large)
    with pytest.raises(UserError, match=r"tiny, game 0, turn 0: T5 computed a feature that is not"):
        next(maker.records([games.turns("train")[0]], games.info))
    t5.final_norm.scale.set_value(jnp.ones_like(large))
    weights = vae.encoder.conv_out.kernel
    weights.set_value(weights[...].at[(0,) * weights[...].ndim].set(jnp.nan))
    with pytest.raises(UserError, match=r"game 0, turn 3: the VAE computed a feature that is not"):
        next(maker.records([games.turns("train")[3]], games.info))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch 0"),
        ({"num_text_tokens": 0}, "text tokens 0"),
        ({"shard_size": 0}, "shard 0"),
    ],
)
def test_numbers_that_cannot_be(bundle, games_path, tmp_path, changes, message):
    assert message in refusal(
        tmp_path / "f", bundle=bundle, games=open_games(games_path), **changes
    )


def test_a_taken_place(features, bundle, games_path):
    with pytest.raises(UserError, match="already there"):
        write_features(
            features.path, bundle=bundle, games=open_games(games_path), num_text_tokens=3
        )


def test_clips_that_come_again_are_not_computed_again(
    features, bundle, networks, games_path, monkeypatch
):
    """As long as they are remembered; what is stored is the same."""
    games = open_games(games_path)
    tokenizer = Tokenizer.load(bundle.tokenizer_dir, num_queries=1)
    turns = [games.turns("train")[i] for i in range(10)]
    computed = []

    def count(vae, clips):
        computed.append(len({clip.tobytes() for clip in np.asarray(clips)}))
        return encode_clips(vae, clips)

    monkeypatch.setattr(features_module, "encode_clips", count)
    monkeypatch.setattr(features_module, "_GROUP", 1)
    for remembered, expected in ((1 << 20, 10), (0, 20)):
        monkeypatch.setattr(features_module, "_CACHE_BYTES", remembered)
        computed.clear()
        maker = FeatureMaker(**networks, tokenizer=tokenizer, num_text_tokens=3, batch_size=4)
        made = list(maker.records([*turns, *turns[:2], *turns[4:], *turns[2:4]], games.info))
        assert sum(computed) == expected
        again = [*range(10), 0, 1, *range(4, 10), 2, 3]
        for parts, k in zip(made, again, strict=True):
            np.testing.assert_allclose(
                parts["latents"]["moments"], features.latents("train")[k]["moments"], **FLOAT16
            )
            assert parts["conditions"]["motion_text"] == turns[k]["motion_text"]
