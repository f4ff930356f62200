"""Two real processes as two hosts: the losses of one, kills, checkpoints, errors."""

import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tiny_stage
from flags import xla_flags
from helpers import random_leaves
from tiny_games import write_model
from tiny_sets import write_features_set
from training_runs import LONG, Measuring, make_run

from animegamer_jax import devices, distributed
from animegamer_jax.bundle.bundle import Bundle, BundleWriter
from animegamer_jax.cli import main
from animegamer_jax.distributed import HostOptions
from animegamer_jax.errors import UserError
from animegamer_jax.protocol import PAPER
from animegamer_jax.train.loop import train

STAGES = ("warmup", "decoder", "mllm", "adapt")
STEPS = 20
RUN = """
import json, sys
import jax
jax.config.update("jax_default_matmul_precision", "highest")
from animegamer_jax.cli import main
for words in json.loads(sys.argv[1]):
    if status := main(words):
        sys.exit(status)
"""
SIGNALLED = """
import sys
from pathlib import Path
import jax
jax.config.update("jax_platforms", "cpu")
from animegamer_jax.distributed import HostOptions
port, host, out, kind = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
HostOptions(coordinator=f"localhost:{port}", hosts=2, host=host, connect_seconds=60).join()
import dataclasses, time
import numpy as np
from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.errors import UserError
from animegamer_jax.sharding import MESH_AXES
from animegamer_jax.train.loop import train
from training_runs import LONG, Measuring, make_run

class Slow(Measuring):
    def samples(self, sources, *, split):
        def read(item):
            index, sample = item
            time.sleep(0.01)
            if kind == "broken" and host == 1 and split == "train" and index % 64 == 5:
                raise UserError("game 5: broken")
            return sample
        return super().samples(sources, split=split).map_with_index(lambda *x: read(x))

steps = 4 if kind == "short" else 2000
recipe = dataclasses.replace(LONG, steps=steps, save_every=5000, eval_every=5000)
order = np.array(jax.devices())[[0, 2, 3, 1]]  # hosts 0 1 1 0, as a slice's links may have it
mesh = jax.sharding.Mesh(order.reshape(2, 2, 1, 1), MESH_AXES)
run = make_run(out, Bundle.open(sys.argv[5]), recipe=recipe, kind=Slow, mesh=mesh)
try:
    sys.exit(train(run))
except UserError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
"""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def start(commands: list[list[str]], *, host: int | None = None, port: int = 0) -> subprocess.Popen:
    """A host with one device that runs commands: alone, or each as host `host` of two."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment["XLA_FLAGS"] = xla_flags()
    hosts = ["--coordinator", f"localhost:{port}", "--hosts", "2", "--host", str(host)]
    given = [words if host is None else [*words, *hosts] for words in commands]
    return subprocess.Popen(
        [sys.executable, "-c", RUN, json.dumps(given)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start_tiny(kind: str, out: Path, model: Path, *, host: int, port: int) -> subprocess.Popen:
    """A host that trains the tiny stage in small steps."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment["XLA_FLAGS"] = xla_flags(2)
    return subprocess.Popen(
        [sys.executable, "-c", SIGNALLED, str(port), str(host), str(out), kind, str(model)],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )


def on_one_host(commands: list[list[str]]) -> None:
    """Runs commands that must succeed."""
    alone = start(commands)
    _, errors = alone.communicate(timeout=400)
    assert alone.returncode == 0, errors


def on_two_hosts(*commands: list[list[str]]) -> list[subprocess.CompletedProcess]:
    """Runs commands on two hosts; one list for both, or one for each."""
    port = free_port()
    pairs = commands if len(commands) == 2 else commands * 2
    hosts = [start(words, host=i, port=port) for i, words in enumerate(pairs)]
    found = []
    for host in hosts:
        out, err = host.communicate(timeout=400)
        found.append(subprocess.CompletedProcess(host.args, host.returncode, out, err))
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a tiny model and features."""
    folder = tmp_path_factory.mktemp("hosts")
    write_model(folder)
    write_features_set(folder / "features", 4, splits=("train", "test"))
    return folder


def words(
    place: Path, stage: str, out: Path, *, model: Path | None = None, steps: int = STEPS, **more
) -> list[str]:
    options = {"batch-size": 8, "log-every": 1, "eval-every": STEPS, "eval-batches": 1, **more}
    options["optimizer.decay"] = "constant"  # a run of half the steps is the first half of a run
    flat = [str(x) for name, value in options.items() for x in (f"--{name}", value)]
    given = ["--data", place / "features", "--model", model or place / "model", "--out", out]
    return ["train", stage, *map(str, given), "--steps", str(steps), "--save-every", "10", *flat]


def losses(out: Path) -> dict[int, float]:
    lines = (out / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {r["step"]: r["loss"] for r in records if "loss" in r}


def weights(out: Path) -> dict[str, np.ndarray]:
    bundle = Bundle.open(out / "model")
    names = [name for name in ("mllm", "encoder", "dit") if bundle.has(name)]
    return {f"{n}/{path}": bundle.read(n, path) for n in names for path in bundle.leaves(n)}


def assert_close(a: Path, b: Path) -> None:
    """Sums over devices are taken in another order, in bfloat16; Adam makes steps of any gradient.

    So weights are compared as whole leaves: a bias of keys, which softmax does not feel, walks by
    rounding alone.
    """
    found, expected = losses(a), losses(b)
    assert found.keys() == expected.keys() == set(range(1, STEPS + 1))
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=3e-3)
    for (name, x), y in zip(weights(a).items(), weights(b).values(), strict=True):
        assert np.linalg.norm(x - y) <= 3e-3 * np.linalg.norm(y), name


@pytest.fixture(scope="module")
def alone(place) -> dict[str, Path]:
    """Every stage on one host."""
    found = {stage: place / f"{stage} alone" for stage in STAGES}
    on_one_host([words(place, stage, out) for stage, out in found.items()])
    return found


@pytest.mark.hosts
def test_two_hosts_train_every_stage_as_one_does(place, alone):
    outs = {stage: place / f"{stage} on two" for stage in STAGES}
    done = on_two_hosts([words(place, stage, out) for stage, out in outs.items()])
    assert [d.returncode for d in done] == [0, 0], done[0].stderr + done[1].stderr
    assert "done" in done[0].stderr + done[0].stdout
    assert "done" not in done[1].stderr + done[1].stdout, "only the first host prints"
    for stage, out in outs.items():
        assert_close(out, alone[stage])


@pytest.mark.hosts
def test_killed_hosts_resume_and_one_resumes_for_two(place, alone):
    out = place / "killed"
    command = words(place, "decoder", out)
    port = free_port()
    hosts = [start([command], host=i, port=port) for i in range(2)]
    end = time.monotonic() + 300
    while not (out / "checkpoints" / "10").exists() and time.monotonic() < end:
        time.sleep(0.05)
        assert all(host.poll() is None for host in hosts)
    hosts[1].kill()
    time.sleep(0.2)
    hosts[0].kill()
    for host in hosts:
        host.communicate()
    done = on_two_hosts([command])
    assert [d.returncode for d in done] == [0, 0], done[0].stderr + done[1].stderr
    assert_close(out, alone["decoder"])

    half = place / "half"
    begun = on_two_hosts([words(place, "decoder", half, steps=10)])
    assert [d.returncode for d in begun] == [0, 0], begun[0].stderr
    on_one_host([words(place, "decoder", half)])
    assert_close(half, alone["decoder"])


def test_hosts_that_differ_are_refused(place):
    out = place / "differ"
    done = on_two_hosts(
        [words(place, "warmup", out)], [words(place, "warmup", out, **{"batch-size": 16})]
    )
    assert [d.returncode for d in done] == [2, 2]
    for d in done:
        assert "host 1 and host 0 differ in recipe.batch_size" in d.stderr


def test_hosts_with_other_layouts_are_refused(place):
    """Before anything is removed."""
    out = place / "laid out"
    (out / "checkpoints").mkdir(parents=True)
    command = [*words(place, "warmup", out), "--start", "fresh"]
    done = on_two_hosts([command], [[*command, "--fsdp", "2"]])
    assert [d.returncode for d in done] == [2, 2]
    for d in done:
        assert "host 1 and host 0 differ in layout" in d.stderr
    assert (out / "checkpoints").is_dir()


@pytest.mark.slow
def test_a_mistake_of_one_host_stops_both(place):
    """A dataset that only the first has; then a result that only the first may not write."""
    out = place / "mistakes"
    lost = words(place, "warmup", out)
    lost[lost.index("--data") + 1] = str(place / "lost" / "features")
    done = on_two_hosts([words(place, "warmup", out)], [lost])
    assert [d.returncode for d in done] == [2, 2], done[0].stderr + done[1].stderr
    assert "host 1: " + str(place / "lost" / "features: not a dataset") in done[0].stderr
    assert str(place / "lost" / "features: not a dataset") in done[1].stderr

    (out / "model").mkdir(parents=True)
    (out / "model" / "something").write_text("else")
    command = [*words(place, "warmup", out, steps=1), "--fsdp", "2"]
    done = on_two_hosts([command])
    assert [d.returncode for d in done] == [2, 2], done[0].stderr + done[1].stderr
    assert "not overwritten, because it holds no config.json" in done[0].stderr
    assert f"host 0: {out}/model: not overwritten" in done[1].stderr

    shutil.rmtree(out / "model")
    done = on_two_hosts([command])  # it resumes, and gathers weights of which no host has all
    assert [d.returncode for d in done] == [0, 0], done[0].stderr + done[1].stderr
    assert main([*words(place, "warmup", place / "one step", steps=1)]) == 0
    for (name, x), y in zip(
        weights(out).items(), weights(place / "one step").values(), strict=True
    ):
        assert np.linalg.norm(x - y) <= 3e-3 * np.linalg.norm(y), name


@pytest.mark.slow
def test_a_mesh_that_alternates_between_hosts_trains_as_one_device(place, tmp_path):
    """The same samples with the same noise; and what a stage measures at the end it sees whole."""
    out, port, model = tmp_path / "two", free_port(), place / "tiny"
    config = tiny_stage.CONFIG
    with BundleWriter(model, name="start", protocol=PAPER) as writer:
        for name in ("encoder", "vae"):
            network = getattr(config, name)
            writer.write_network(name, network, random_leaves(name, network, 0))
        writer.write_tokenizer(place / "model" / "tokenizer")
    hosts = [start_tiny("short", out, model, host=i, port=port) for i in range(2)]
    output = [host.communicate(timeout=200)[1] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], "".join(output)
    recipe = dataclasses.replace(LONG, steps=4, save_every=5000, eval_every=5000)
    alone = tmp_path / "alone"
    assert train(make_run(alone, Bundle.open(model), recipe=recipe, kind=Measuring)) == 0
    found, expected = losses(out), losses(alone)
    assert found.keys() == expected.keys() == {1, 2, 3, 4}
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-5)
    encoder = Bundle.open(out / "model").config.encoder
    assert encoder is not None
    assert encoder.dtype == "bfloat16"  # as measured


@pytest.mark.slow
def test_ctrl_c_on_one_host_saves_on_both(place, tmp_path):
    out, port = tmp_path / "out", free_port()
    model = place / "model"
    hosts = [start_tiny("whole", out, model, host=i, port=port) for i in range(2)]
    file, end = out / "metrics.jsonl", time.monotonic() + 200
    while not file.exists() or '"step": 5,' not in file.read_text():
        assert all(host.poll() is None for host in hosts)
        assert time.monotonic() < end
        time.sleep(0.05)
    hosts[1].send_signal(signal.SIGINT)
    output = [host.communicate(timeout=100)[1] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 130], "".join(output)
    (saved,) = (out / "checkpoints").iterdir()
    assert f"SIGTERM after step {saved.name} of 2000: saved in {out}" in output[0]


@pytest.mark.slow
def test_a_record_that_one_host_cannot_read_stops_both(place, tmp_path):
    port = free_port()
    hosts = [
        start_tiny("broken", tmp_path / "out", place / "model", host=i, port=port) for i in range(2)
    ]
    output = [host.communicate(timeout=200)[1] for host in hosts]
    assert [host.returncode for host in hosts] == [2, 2], "".join(output)
    assert "host 1: game 5: broken" in output[0]
    assert "game 5: broken" in output[1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"hosts": 2}, "expected all of them or none"),
        ({"coordinator": "here", "hosts": 2, "host": 0}, "--coordinator here: expected HOST:PORT"),
        ({"coordinator": "a:1", "hosts": 2, "host": 2}, "--host 2: expected 0 to 1, for --hosts 2"),
        ({"coordinator": "a:b", "hosts": 2, "host": 0}, "--coordinator a:b: expected HOST:PORT"),
        ({"coordinator": "a:70000", "hosts": 2, "host": 1}, "a:70000: expected HOST:PORT"),
    ],
)
def test_options_that_contradict_each_other(given, message):
    with pytest.raises(UserError, match=message):
        HostOptions(**given, connect_seconds=1).join()


JOIN = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
from animegamer_jax.distributed import HostOptions
from animegamer_jax.errors import UserError
port, hosts, host, seconds = map(int, sys.argv[1:])
options = HostOptions(
    coordinator=f"localhost:{port}", hosts=hosts, host=host, connect_seconds=seconds
)
try:
    options.join()
except UserError as error:
    sys.exit(str(error))
print("joined", jax.process_count())
"""


def join(port: int, *, hosts: int, host: int, seconds: int) -> subprocess.Popen:
    """A process that joins others and ends."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    numbers = map(str, (port, hosts, host, seconds))
    return subprocess.Popen(
        [sys.executable, "-c", JOIN, *numbers],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_hosts_that_do_not_all_come_end_in_one_line():
    """Two of three; and one whose coordinator is not there."""
    port, other = free_port(), free_port()
    processes = [join(port, hosts=3, host=i, seconds=4) for i in (0, 2)]
    processes.append(join(other, hosts=2, host=1, seconds=4))
    for process, place, count in zip(processes, (port, port, other), (3, 3, 2), strict=True):
        out, err = process.communicate(timeout=60)
        waiting, message = err.splitlines()
        assert (process.returncode, out) == (2, "")
        assert waiting == f"waiting up to 4 s for {count} hosts at localhost:{place}"
        assert message.startswith(f"not all {count} hosts joined at localhost:{place} within 4 s: ")


def test_hosts_with_other_numbers_of_hosts_are_refused():
    port = free_port()
    processes = [join(port, hosts=2 + 2 * i, host=i, seconds=60) for i in range(2)]
    for process in processes:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "host 1 and host 0 differ in hosts" in err


def test_ctrl_c_ends_the_wait():
    process = join(free_port(), hosts=2, host=1, seconds=60)
    assert process.stderr is not None
    assert "waiting up to 60 s for 2 hosts" in process.stderr.readline()
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == -signal.SIGINT


def test_a_port_that_is_taken():
    with socket.create_server(("", 0)) as taken:
        place = f"localhost:{taken.getsockname()[1]}"
        options = HostOptions(coordinator=place, hosts=2, host=0)
        with pytest.raises(
            UserError, match=f"{place}: this host cannot listen there .* another port"
        ):
            options.join()


ALONE = """
import jax
from animegamer_jax.distributed import HostOptions, on_cluster
assert on_cluster()
HostOptions(connect_seconds=5).join()
assert not jax.distributed.is_initialized()
assert jax.process_count() == 1
"""


def test_a_machine_that_looks_like_a_cluster_continues_alone():
    """Some of Slurm's names are set, as by a site's own scripts; JAX finds no cluster in them."""
    environment = {**os.environ, "SLURM_STEP_NODELIST": "node1"}
    done = subprocess.run(
        [sys.executable, "-c", ALONE], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "waiting up to 5 s for other hosts, if JAX finds any" in done.stderr


def test_a_shell_inside_a_job_is_no_step(monkeypatch):
    monkeypatch.setattr(devices, "_TPU_FILES", ())
    for name in distributed._CLUSTERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert not distributed.on_cluster()
