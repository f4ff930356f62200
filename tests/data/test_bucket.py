"""A bundle and a game dataset that were copied into a bucket make the features that they make here.

The bucket is a real server (fake-gcs-server), the clients are the real libraries.
"""

import subprocess
import sys

import pytest
from bucket_server import NAME, serving_bucket
from tiny_games import write_model
from tiny_sets import write_games

from animegamer_jax.cli import main

CODE = """
import sys
import gcsfs
from animegamer_jax.cli import main
from animegamer_jax.data.datasets import open_features
local, bucket = sys.argv[1:]
files = gcsfs.GCSFileSystem()
for name in ("model", "games"):
    files.put(f"{local}/{name}/", f"{bucket}/{name}/", recursive=True)
place = f"gs://{bucket}"
words = ["--model", f"{place}/model", "--data", f"{place}/games", "--out", f"{place}/features"]
status = main(["data", "features", *words, "--batch", "8"])
found = open_features(f"{place}/features")
first = found.turns("train")[0], found.latents("test")[4]
print(status, found.info.splits, [record["game"] for record in first])
"""


@pytest.mark.scale
def test_features_in_a_bucket_are_those_of_this_machine(tmp_path):
    write_model(tmp_path, networks=("encoder", "t5", "clip", "vae"))
    write_games(tmp_path / "games", {"train": 2, "test": 1})
    words = ("--model", tmp_path / "model", "--data", tmp_path / "games")
    out = tmp_path / "features"
    assert main(["data", "features", *map(str, (*words, "--out", out, "--batch", 8))]) == 0
    with serving_bucket(tmp_path / "server") as environment:
        done = subprocess.run(
            [sys.executable, "-c", CODE, str(tmp_path), NAME],
            env={**environment, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "0 {'train': 10, 'test': 5} [0, 2]"
    stored = tmp_path / "server" / NAME / "features"
    shards = sorted(path.relative_to(out) for path in out.rglob("*array_record-*"))
    assert len(shards) == 4
    for shard in shards:
        assert (stored / shard).read_bytes() == (out / shard).read_bytes()
