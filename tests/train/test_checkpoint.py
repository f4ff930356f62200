"""Checkpoints: what comes back, what stays, what is refused, and a disk that is full."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from etils import epath
from tiny_stage import RECIPE, TinyStage, arrays, make_networks, make_stage, one_device

from animegamer_jax.errors import UserError
from animegamer_jax.sharding import make_mesh
from animegamer_jax.storage.serialization import to_json
from animegamer_jax.train.checkpoint import (
    Checkpoints,
    _checksum,
    differing_field,
    extended_from,
)
from animegamer_jax.train.optimizer import make_optimizer
from animegamer_jax.train.step import TrainState, make_state

RUN_CONFIG = {"stage": "tiny", "recipe": to_json(RECIPE)}


def new_state(mesh: jax.sharding.Mesh | None = None, stage: TinyStage | None = None) -> TrainState:
    optimizer = make_optimizer(RECIPE.optimizer, steps=6)
    mesh = one_device() if mesh is None else mesh
    return make_state(make_networks(), stage or make_stage(), optimizer, mesh=mesh)


@pytest.fixture(scope="module")
def fresh() -> TrainState:
    return new_state()


def at(state: TrainState, step: int) -> TrainState:
    """A state that differs from every other step's, in arrays of its own."""
    state = jax.tree.map(lambda x: x + 0, state)
    return jax.tree.map(lambda x: x + jnp.asarray(step).astype(x.dtype), state)


def kept(state: TrainState) -> dict[str, np.ndarray]:
    return arrays(state._replace(graphdef=None, frozen=None))


def open_at(folder: Path, *, run_config: Any = None, keep_last: int = 2, best_mode: str = "min"):
    return Checkpoints(
        epath.Path(folder),
        run_config=run_config or RUN_CONFIG,
        keep_last=keep_last,
        best_mode=best_mode,
    )


@pytest.fixture(scope="module")
def saved(fresh, tmp_path_factory) -> Path:
    """A folder with one checkpoint, of step 4."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    checkpoints = open_at(folder)
    checkpoints.save(at(fresh, 4), {"index": 32})
    checkpoints.close()
    return folder


# --- what comes back ------------------------------------------------------------------------


def test_everything_comes_back_bit_for_bit(fresh, saved):
    checkpoints = open_at(saved)
    assert checkpoints.steps() == [4]
    start = jax.tree.map(jnp.copy, fresh)
    state, position = checkpoints.restore(start)
    checkpoints.close()
    assert position == {"index": 32}
    expected = kept(at(fresh, 4))
    assert {name.split(".")[0] for name in expected} == {"step", "params", "opt_state", "ema"}
    for name, value in kept(state).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)
    assert state.frozen is start.frozen
    assert state.graphdef == start.graphdef


def test_what_is_stored_is_the_state_of_its_step(fresh, tmp_path):
    """Though the next step takes its arrays over while they are being written."""
    checkpoints = open_at(tmp_path / "c")
    grow = jax.jit(lambda s: jax.tree.map(lambda x: x + jnp.ones((), x.dtype), s), donate_argnums=0)
    state = at(fresh, 1)
    expected = kept(state)
    checkpoints.save(state, {})
    for _ in range(3):
        state = grow(state)
    state, _ = checkpoints.restore(state, step=1)
    checkpoints.close()
    for name, value in kept(state).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


@pytest.mark.parametrize("shape", [{"data": 8}, {"data": 2, "fsdp": 4}])
def test_restored_onto_another_mesh(fresh, saved, shape):
    start = new_state(make_mesh(shape))
    wanted = jax.tree.map(lambda x: x.sharding, start)
    checkpoints = open_at(saved)
    state, _ = checkpoints.restore(start)
    checkpoints.close()
    assert jax.tree.map(lambda x: x.sharding, state) == wanted
    for name, value in kept(state).items():
        np.testing.assert_array_equal(value, kept(at(fresh, 4))[name], err_msg=name)


# --- what stays -----------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "best"), [("min", 2), ("max", 3)])
def test_the_last_ones_and_the_best_stay(fresh, tmp_path, mode, best):
    """A score that is not finite is nobody's best, and comes back as known."""
    scores = {2: 0.5, 3: 0.9, 4: 0.7, 5: float("nan"), 6: float("-inf" if mode == "min" else "inf")}
    checkpoints = open_at(tmp_path / "c", best_mode=mode)
    assert checkpoints.best_step() is None
    for step in range(1, 8):
        checkpoints.save(at(fresh, step), {})
        if step in scores:
            checkpoints.set_score(step, scores[step])
    checkpoints.wait()
    assert checkpoints.best_step() == best
    assert checkpoints.steps() == [best, 6, 7]
    checkpoints.close()
    again = open_at(tmp_path / "c", best_mode=mode)
    assert again.steps() == [best, 6, 7]
    assert again.best_step() == best
    assert (again.scores[best], again.scores[6]) == (scores[best], None)
    assert 7 not in again.scores
    again.close()


def test_a_score_that_comes_before_its_checkpoint(fresh, tmp_path):
    """As of a step that is saved only because of a signal; and a step is saved once."""
    checkpoints = open_at(tmp_path / "c")
    checkpoints.set_score(1, 0.5)
    assert checkpoints.scores == {}
    checkpoints.save(at(fresh, 1), {"index": 8})
    assert checkpoints.scores == {1: 0.5}
    checkpoints.save(at(fresh, 1), {"index": 9})
    checkpoints.set_score(2, 0.25)
    checkpoints.save(at(fresh, 3), {})
    assert checkpoints.scores == {1: 0.5}
    checkpoints.close()
    again = open_at(tmp_path / "c")
    assert again.restore(jax.tree.map(jnp.copy, fresh), step=1)[1] == {"index": 8}
    again.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"4": 0.', r"not valid JSON: .*: remove it"),
        ('{"x": 0.5}', r"expected steps, found \['x'\]: remove it"),
        ('{"4": "0.5"}', r".*: remove it"),
    ],
)
def test_damaged_scores_are_refused(saved, tmp_path, text, message):
    folder = shutil.copytree(saved, tmp_path / "c")
    (folder / "scores.json").write_text(text)
    with pytest.raises(UserError, match=rf"c/scores\.json: {message}"):
        open_at(folder)


def test_a_pipe_in_a_checkpoint_is_refused(fresh, saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "c")
    found = next(path for path in sorted(folder.glob("*/run_config/*")) if path.is_file())
    found.unlink()
    os.mkfifo(found)
    checkpoints = open_at(folder)
    with pytest.raises(UserError, match=f"{found.name}: expected .*pipe"):
        checkpoints.check()
    checkpoints.close()


def test_a_checkpoint_of_another_version_is_refused(fresh, saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "c")
    (folder / "4" / "run_config").rename(folder / "4" / "about")
    checkpoints = open_at(folder)
    with pytest.raises(UserError, match="step 4 has no run_config: another version") as caught:
        checkpoints.restore(fresh)
    assert "\n" not in str(caught.value)
    checkpoints.close()


def test_a_half_written_one_is_ignored_and_removed(fresh, saved, tmp_path):
    folder = tmp_path / "c"
    shutil.copytree(saved, folder)
    half = folder / "9.orbax-checkpoint-tmp-1234567"
    shutil.copytree(folder / "4", half)
    checkpoints = open_at(folder)
    assert checkpoints.steps() == [4]
    state, _ = checkpoints.restore(jax.tree.map(jnp.copy, fresh))
    assert int(state.step) == 4
    checkpoints.save(at(fresh, 10), {})
    assert not half.exists()
    checkpoints.close()


# --- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((f"recipe.{name}", 77) for name in ("batch_size", "seed", "ema_decay")),
        ("recipe.optimizer.learning_rate", 0.5),
        ("stage", "mllm"),
    ],
)
def test_another_configuration_is_refused(fresh, saved, field, value):
    run_config = json.loads(json.dumps(RUN_CONFIG))
    *parents, last = field.split(".")
    node = run_config
    for parent in parents:
        node = node[parent]
    before, node[last] = node[last], value
    checkpoints = open_at(saved, run_config=run_config)
    with pytest.raises(UserError) as caught:
        checkpoints.restore(fresh)
    checkpoints.close()
    message = f"the checkpoint of step 4 has another configuration: {field} was {before!r}, is"
    assert f"{message} {value!r}:" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_fields_that_may_change():
    free = {"save_every": 9, "keep_last": 9, "eval_every": 9, "log_every": 9, "remat": "full"}
    free |= {"eval_clips": 1, "eval_sampling_steps": 2}  # which this recipe does not even have
    other = {"stage": "tiny", "recipe": {**RUN_CONFIG["recipe"], **free, "steps": 99}}
    assert differing_field(RUN_CONFIG, other) is None
    cosine = {"stage": "tiny", "recipe": {"steps": 5, "optimizer": {"decay": "cosine"}}}
    longer = {"stage": "tiny", "recipe": {"steps": 6, "optimizer": {"decay": "cosine"}}}
    assert differing_field(cosine, longer) is None
    assert differing_field(longer, cosine) == "recipe.steps was 6, is 5"
    assert extended_from(cosine, longer) == 5
    assert extended_from(longer, cosine) is None
    assert extended_from(cosine, cosine) is None
    assert extended_from(RUN_CONFIG, other) is None  # its rate does not depend on the steps
    assert differing_field(cosine, {**cosine, "new": 1}) == "new was 'absent', is 1"


def test_a_data_set_of_another_content_is_refused(fresh, tmp_path):
    def run_config(*contents: str) -> dict[str, Any]:
        data = {
            f"{i}": {"name": f"film{i}", "weight": 1.0, "content": content}
            for i, content in enumerate(contents)
        }
        return {**RUN_CONFIG, "data": data}

    folder = tmp_path / "c"
    checkpoints = open_at(folder, run_config=run_config("xx", "aa"))
    checkpoints.save(at(fresh, 1), {})
    checkpoints.close()
    same = open_at(folder, run_config=run_config("xx", "aa"))
    assert same.check() == 1
    same.close()
    other = open_at(folder, run_config=run_config("xx", "bb"))
    expected = (
        "the dataset film1 differs from the one that the checkpoint of step 1 was trained on "
        "(data.1.content was 'aa', is 'bb'): train on that one, or choose another --out"
    )
    with pytest.raises(UserError) as caught:
        other.check()
    assert str(caught.value) == f"{folder}: {expected}"
    other.close()
    more = open_at(folder, run_config=run_config("xx", "aa", "cc"))
    with pytest.raises(UserError, match=r"data\.2\.name was 'absent', is 'film2'"):
        more.check()
    more.close()


def test_a_damaged_one_is_named(fresh, saved, tmp_path):
    folder = tmp_path / "c"
    shutil.copytree(saved, folder)
    for file in (folder / "4" / "state").rglob("*"):
        if file.is_file() and file.parent.name == "d":
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    checkpoints = open_at(folder)
    with pytest.raises(
        UserError, match=r"c/4.*remove .*c/4 to start from the checkpoint before"
    ) as caught:
        checkpoints.restore(jax.tree.map(jnp.copy, fresh))
    assert "\n" not in str(caught.value)
    checkpoints.close()


def test_a_flipped_bit_is_refused(fresh, saved, tmp_path):
    """Also on another mesh; a checkpoint of an earlier version has no checksums."""
    folder = tmp_path / "c"
    shutil.copytree(saved, folder)
    name = next(name for name in kept(fresh) if "opt_state" in name and "kernel" in name)
    base = {"driver": "file", "path": f"{folder / '4/state'}/"}
    kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    store = ts.open({"driver": "zarr", "kvstore": kvstore}).result()
    value = store.read().result()
    value.view(np.uint32)[-1, -1] ^= 1 << 7
    store.write(value).result()
    for mesh in (None, make_mesh({"data": 4, "fsdp": 2})):
        checkpoints = open_at(folder)
        with pytest.raises(UserError) as caught:
            checkpoints.restore(new_state(mesh))
        checkpoints.close()
        assert str(caught.value) == (
            f"{folder / '4'}: damaged (the arrays differ from their checksums): remove "
            f"{folder / '4'} to start from the checkpoint before it"
        )
    shutil.rmtree(folder / "4" / "checksums")
    checkpoints = open_at(folder)
    assert checkpoints.restore(jax.tree.map(jnp.copy, fresh))[1] == {"index": 32}
    checkpoints.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "bool"])
def test_any_flipped_bit_changes_a_checksum(dtype):
    array = np.arange(6).reshape(2, 3).astype(dtype)
    found = int(_checksum(jnp.asarray(array)))
    assert found == int(jax.jit(_checksum)(array))
    for place, bit in np.ndindex(6, 1 if dtype == "bool" else 8 * array.itemsize):
        other = array.copy()
        other.view(f"uint{8 * array.itemsize}").flat[place] ^= 1 << bit
        assert int(_checksum(jnp.asarray(other))) != found, (place, bit)
    assert int(_checksum(jnp.asarray(array[:, ::-1]))) != found


def test_no_checkpoint(fresh, tmp_path):
    checkpoints = open_at(tmp_path / "c")
    with pytest.raises(UserError, match="expected a checkpoint, found none"):
        checkpoints.restore(fresh)
    checkpoints.close()


# --- a full disk ----------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small disk cannot be mounted here: needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_leaves_the_checkpoint_before(fresh, small_disk):
    checkpoints = open_at(small_disk / "c", keep_last=5)
    checkpoints.save(at(fresh, 1), {"index": 8})
    checkpoints.wait()
    step = 1
    message = ""
    while not message and step < 9:
        step += 1
        try:
            checkpoints.save(at(fresh, step), {"index": 8 * step})
            checkpoints.wait()
        except UserError as error:
            message = str(error)
    assert "\n" not in message
    assert "a checkpoint cannot be written: No space left on device: free space there" in message
    again = open_at(small_disk / "c", keep_last=5)
    assert again.steps() == list(range(1, step))
    state, position = again.restore(jax.tree.map(jnp.copy, fresh))
    again.close()
    assert position == {"index": 8 * (step - 1)}
    for name, value in kept(state).items():
        np.testing.assert_array_equal(value, kept(at(fresh, step - 1))[name], err_msg=name)
