"""The whole way in a bucket, over clusters: what comes out is what comes out on this machine.

Films in the bucket become shots, annotations, games, features, two training steps, and a third one
of a resumed run. Films are cut and annotated by a Dask cluster, which loses a worker while films
are cut; games are made by a portable job service. The bucket's server is killed while clips are
annotated, while features are written and while the training saves: the same commands, given
again, go on and lose nothing.
"""

import json
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from bucket_server import NAME, BucketServer, running_bucket
from dask_cluster import dask_cluster
from job_service import job_service
from PIL import Image
from stand_in_server import Question, Reply, says, serving
from tiny_games import write_model

from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.cli import main
from animegamer_jax.protocol import PAPER
from animegamer_jax.toy.drawing.style import FilmStyle
from animegamer_jax.toy.films import make_film, write_film

pytest.importorskip("distributed")

pytestmark = pytest.mark.scale

SIZE = ("--height", "16", "--width", "24", "--num-frames", "9")  # that of the tiny model
NETWORKS = ("mllm", "encoder", "dit", "vae", "clip", "t5")
FILMS = 2
# Until there is such an object, then the server is killed.
KILLED_AT = {"annotate": "shots/cache/*", "features": "features/conditions/*/*-00000-of-*"}
KILLED_AT |= {"train": "run/checkpoints/1/*"}
# Runs the commands of a file, one a line, each a JSON list of words; stops at the first that fails.
CODE = """
import json, sys
from animegamer_jax.cli import main
for line in open(sys.argv[1]):
    words = json.loads(line)
    print(*words, flush=True)
    if status := main(words):
        raise SystemExit(status)
"""
COPY = """
import sys, gcsfs
files = gcsfs.GCSFileSystem()
for name in ("films", "model"):
    files.put(f"{sys.argv[1]}/{name}/", f"{sys.argv[2]}/{name}/", recursive=True)
"""


def commands(
    place: str,
    inputs: Path,
    endpoint: str,
    *,
    dask: tuple[str, ...] = (),
    portable: tuple[str, ...] = (),
) -> dict[str, list[str]]:
    """The commands of the way, in the folder or bucket `place`."""
    few = ("--batch-size", "8", "--save-every", "1", "--eval-every", "1", "--eval-batches", "1")
    shots, games, features = (f"{place}/{name}" for name in ("shots", "games", "features"))
    model, run = ("--model", f"{place}/model"), ("--out", f"{place}/run")
    asked = ("--endpoint", endpoint, "--model", "stand-in", "--parallel", "2")
    all_clips = ("--min-turns", "1", "--test-share", "0.3")
    batches = ("--batch", "8", "--shard", "8")
    train = ["train", "mllm", "--data", features, *model, *run, *few]
    characters = ("--characters", f"{inputs}/characters.toml")
    return {
        "films": ["data", "films", f"{place}/films/*.mp4", "--out", shots, *SIZE, *dask],
        "annotate": ["data", "annotate", shots, *characters, *asked, *dask],
        "games": ["data", "games", shots, "--out", games, *all_clips, *portable],
        "features": ["data", "features", "--data", games, *model, "--out", features, *batches],
        "train": [*train, "--steps", "2"],
        "resume": [*train, "--steps", "3"],
    }


def answer(question: Question) -> Reply:
    """One character; place and meters follow from the pictures."""
    odd = zlib.crc32(question.pictures[-1].tobytes()) % 2
    said = {"subject": "Mika", "adverb": "slowly", "motion": "waving", "motion_level": 2}
    said |= {"environment": ("forest", "harbour")[odd], "time": "day"}
    return says(json.dumps(said | {"social": odd, "entertainment": 1, "stamina": 1}), delay=0.2)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with serving(answer) as server:
        yield server.endpoint


@pytest.fixture(scope="module")
def local(endpoint, tmp_path_factory) -> Path:
    """The way on this machine, without a stop."""
    place = tmp_path_factory.mktemp("local")
    (place / "films").mkdir()
    for seed in range(FILMS):
        style = FilmStyle(fps=24, hold=3)
        film = make_film(seed, num_shots=5, height=96, width=144, style=style)
        write_film(place / "films" / f"film {seed}.mp4", film)
    write_model(place, networks=NETWORKS, protocol=PAPER)
    Image.new("RGB", (40, 60), (200, 30, 30)).save(place / "mika.png")
    (place / "characters.toml").write_text('[[character]]\nname = "Mika"\nimages = ["mika.png"]\n')
    for name, words in commands(str(place), place, endpoint).items():
        assert main(words) == 0, name
    return place


def run_way(server: BucketServer, folder: Path, steps: dict[str, list[str]]) -> subprocess.Popen:
    (folder / "commands").write_text("\n".join(map(json.dumps, steps.values())))
    return subprocess.Popen(
        [sys.executable, "-c", CODE, str(folder / "commands")],
        env={**server.environment, "PYTHONPATH": ":".join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(pattern: str, server: BucketServer, process: subprocess.Popen) -> None:
    """Until there is such an object in the bucket."""
    while not list(server.objects.glob(pattern)):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


def run_though_killed(server: BucketServer, folder: Path, steps: dict[str, list[str]]) -> None:
    """Runs commands while the server is killed and started again, in the first of them."""
    process = run_way(server, folder, steps)
    wait_for(KILLED_AT[next(iter(steps))], server, process)
    server.kill()
    time.sleep(2)
    server.start()
    said = process.communicate()[0]
    if process.returncode:  # it did not wait for the server: the same commands go on
        assert "Traceback" not in said, said
        again = run_way(server, folder, steps)
        said = again.communicate()[0]
        assert again.returncode == 0, said


def test_the_way_in_a_bucket(local, endpoint, tmp_path):
    place = f"gs://{NAME}"
    with running_bucket(tmp_path / "server") as server:
        copied = [sys.executable, "-c", COPY, str(local), NAME]
        subprocess.run(copied, env=server.environment, check=True)
        cluster = dask_cluster(tmp_path / "cluster", server.environment)
        with cluster as (address, workers), job_service() as options:
            dask = "--runner", "dask", "--beam-options", f"dask_client_address={address}"
            portable = "--runner", "portable", "--beam-options", *options
            steps = commands(place, local, endpoint, dask=dask, portable=portable)
            films = run_way(server, tmp_path, {"films": steps["films"]})
            wait_for("shots/*/*", server, films)
            workers[0].kill()
            said = films.communicate()[0]
            assert films.returncode == 0, said
            for names in (("annotate", "games"), ("features",), ("train", "resume")):
                run_though_killed(server, tmp_path, {name: steps[name] for name in names})
        compare(local, server.objects)
        compare_weights(local / "run" / "model", server, tmp_path)


def compare(local: Path, bucket: Path) -> None:
    """Every record, clip and row is the same, byte for byte."""
    for name in ("shots", "games", "features"):
        files = {
            path.relative_to(local): path.read_bytes()
            for path in sorted((local / name).rglob("*"))
            if path.is_file()
            and (path.suffix in (".zip", ".jsonl") or "array_record-" in path.name)
        }
        assert len(files) >= (2 * FILMS if name == "shots" else 2), name
        for path, content in files.items():
            assert (bucket / path).read_bytes() == content, path


def compare_weights(model: Path, server: BucketServer, folder: Path) -> None:
    """The resumed run in the bucket has the weights of the one on this machine."""
    code = (
        "import sys, numpy as np; from flax import nnx; import jax\n"
        "from animegamer_jax.bundle.bundle import Bundle\n"
        "state = nnx.state(Bundle.open(sys.argv[1]).load('mllm'))\n"
        "np.savez(sys.argv[2], *map(np.asarray, jax.tree.leaves(state)))\n"
    )
    words = [sys.executable, "-c", code]
    env = {**server.environment, "PYTHONPATH": ":".join(sys.path)}
    subprocess.run(
        [*words, f"gs://{NAME}/run/model", str(folder / "there.npz")], env=env, check=True
    )
    subprocess.run([*words, str(model), str(folder / "here.npz")], env=env, check=True)
    there, here = np.load(folder / "there.npz"), np.load(folder / "here.npz")
    assert sorted(there) == sorted(here)
    assert len(here.files) > 10
    for name in here.files:
        np.testing.assert_array_equal(there[name], here[name])
    assert Bundle.open(model).config.mllm is not None
