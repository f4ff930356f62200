"""The training loop of every stage: build, restore, step, log, watch, save, finish."""

import contextlib
import dataclasses
import hashlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal

import grain
import jax
import numpy as np
from etils import epath
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.data.datasets import INFO_FILE
from animegamer_jax.data.loader import (
    make_iterator,
    on_mesh,
    rows_here,
)
from animegamer_jax.distributed import check_agreement, together
from animegamer_jax.errors import NonFiniteError, UserError
from animegamer_jax.storage.paths import absolute, telling
from animegamer_jax.storage.serialization import to_json
from animegamer_jax.train.checkpoint import Checkpoints
from animegamer_jax.train.metric_logger import (
    Recorder,
    peak_tflops,
    utilization,
)
from animegamer_jax.train.optimizer import make_optimizer
from animegamer_jax.train.result import write_result
from animegamer_jax.train.stages.base import (
    DataSource,
    Stage,
    Watched,
)
from animegamer_jax.train.step import (
    TrainState,
    averaged,
    first_bad_tensor,
    make_state,
    make_train_step,
    state_shardings,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What is trained, on what, and where it goes.

    Attributes:
        stage: with its recipe.
        bundle: the model that it starts from; None: from nothing.
        sources: data sets.
        out: a folder, absolute or in a bucket: checkpoints/, events/, metrics.jsonl, model/.
        mesh: the devices.
        threads: that read data.
        peak: of a chip, TFLOP/s; None: by the kind of chip.
        result: which weights model/ gets: those of the last step, or of the best checkpoint.
    """

    stage: Stage[Any]
    bundle: Bundle | None
    sources: tuple[DataSource, ...]
    out: epath.Path
    mesh: Mesh
    threads: int = 2
    peak: float | None = None
    result: Literal["last", "best"] = "last"

    def about(self) -> dict[str, Any]:
        """What a checkpoint remembers of the run beside the data sets' contents, as JSON."""
        model = None
        if self.bundle is not None:
            digest = hashlib.sha256((self.bundle.path / "config.json").read_bytes()).hexdigest()
            model = f"{self.bundle.name} {digest[:12]}"
        return {
            "stage": self.stage.name,
            "recipe": to_json(self.stage.recipe),
            "networks": to_json(self.stage.config),
            "protocol": to_json(self.stage.protocol),
            "model": model,
            "data": {  # by name: a data set may move
                f"{i}": {"name": Path(source.path).name, "weight": source.weight}
                for i, source in enumerate(self.sources)
            },
        }


def train(run: Run) -> int:
    """Trains a stage to its recipe's last step, from the last checkpoint if there is one.

    Returns:
        the exit status: 0, also after a SIGTERM, whose run goes on with the same command; 130
        after Ctrl-C, on the host that had it.

    Raises:
        UserError: bad data, another configuration than the checkpoint's, a full disk.
        NonFiniteError: a loss or a gradient is NaN or infinite.
    """
    with _Trainer(run) as trainer, _Signals() as signals:
        while trainer.step < run.stage.recipe.steps:
            trainer.advance()
            if signals.received(trainer.step):
                return trainer.leave(signals)
        trainer.finish()
    return 0


class _Signals:
    """Within the block SIGTERM and Ctrl-C are noted; a second Ctrl-C stops at once.

    Of several hosts one may get the signal. JAX hears a SIGTERM, through a handler of its own, and
    tells all of them after which step to stop.
    """

    def __init__(self):
        self.number: int | None = None
        self._alone = jax.process_count() == 1
        self._handled = (signal.SIGTERM, signal.SIGINT) if self._alone else (signal.SIGINT,)

    def __enter__(self) -> "_Signals":
        self._former = {number: signal.signal(number, self._note) for number in self._handled}
        return self

    def __exit__(self, *error: Any) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.number == signal.SIGINT == number:
            raise KeyboardInterrupt
        self.number = number
        if not self._alone:
            os.kill(os.getpid(), signal.SIGTERM)

    def received(self, step: int) -> bool:
        """Whether to stop after this step; the same on all hosts."""
        if self._alone:
            return self.number is not None
        if not multihost_utils.reached_preemption_sync_point(step):
            return False
        self.number = self.number or signal.SIGTERM
        return True


class _Batches:
    """The data's iterator, one batch ahead, and where it stood before each."""

    def __init__(self, iterator: Any, mesh: Mesh):
        self._iterator, self._mesh = iterator, mesh
        self._batch: Any = None
        self.position = iterator.get_state()

    def restore(self, position: Any) -> None:
        self._iterator.set_state(position)
        self._batch, self.position = None, position

    def current(self) -> Any:
        if self._batch is None:
            self.advance()
        return self._batch

    def advance(self) -> None:
        self.position = self._iterator.get_state()
        self._batch = on_mesh(next(self._iterator), self._mesh)

    def close(self) -> None:
        self._iterator.close()


class _HeldOut:
    """Some batches of held-out data, spread over it, and what a stage scores on them."""

    def __init__(self, stage: Stage[Any], samples: grain.MapDataset, mesh: Mesh):
        self._stage, self._mesh = stage, mesh
        size = stage.recipe.batch_size
        count = stage.recipe.watch_batches * size
        stride = max(1, len(samples) // max(count, 1))
        rows = rows_here(mesh, batch_size=size)
        mine = [
            [samples[(start + k) * stride % len(samples)] for k in rows]
            for start in range(0, count, size)
        ]
        self._batches = [jax.tree.map(lambda *leaves: np.stack(leaves), *part) for part in mine]

        def loss(state: TrainState, batch: Any, key: jax.Array) -> Any:
            return stage.loss(averaged(state), batch, key)

        self._loss = jax.jit(loss)

    def look(self, state: TrainState, key: jax.Array) -> Watched:
        """Means over the batches; the clips are of the first. The draws are the same every time."""
        found: list[Mapping[str, float]] = []
        clips: Mapping[str, Any] = {}
        networks = averaged(state)
        for number, arrays in enumerate(self._batches):
            batch = on_mesh(arrays, self._mesh)
            key_loss, key_watch = jax.random.split(jax.random.fold_in(key, number))
            loss, parts = self._loss(state, batch, key_loss)
            seen = self._stage.watch(networks, batch, key_watch)
            clips = seen.clips if number == 0 else clips
            scalars = {"loss": loss, **parts, **seen.scalars}
            found.append({name: float(value) for name, value in scalars.items()})
        means = {name: float(np.mean([f[name] for f in found])) for name in found[0]}
        return Watched(means, clips)


class _Clock:
    """Seconds of training steps and their data, without compilation, looks and checkpoints."""

    def __init__(self):
        self._seconds, self._steps = 0.0, 0
        self._compiled = False
        self._began, self._in_steps = time.perf_counter(), 0.0

    def add(self, seconds: float) -> None:
        if self._compiled:
            self._seconds, self._steps = self._seconds + seconds, self._steps + 1
            self._in_steps += seconds
        self._compiled = True

    def goodput(self) -> float:
        """The share of this process's time that went into steps: not loading, compiling, looking or
        saving. A step that waits for its data counts whole.
        """
        return self._in_steps / (time.perf_counter() - self._began)

    def rate(self) -> float | None:
        """Steps a second since the last call; None after no step."""
        rate = self._steps / self._seconds if self._seconds else None
        self._seconds, self._steps = 0.0, 0
        return rate


class _Trainer:
    """A run that is being trained: the state, the data, the records."""

    def __init__(self, run: Run):
        self.run, self.stage, self.recipe = run, run.stage, run.stage.recipe
        self._optimizer = make_optimizer(self.recipe.optimizer, steps=self.recipe.steps)
        self._key, self._watch_key = jax.random.split(jax.random.key(self.recipe.seed))
        self._clock, self._told_formula = _Clock(), False
        self._saved: int | None = None
        self._score: float | None = None

    def __enter__(self) -> "_Trainer":
        with contextlib.ExitStack() as opened:
            self._open(opened)
            self._opened = opened.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._opened.close()

    def _open(self, opened: contextlib.ExitStack) -> None:
        """What may refuse goes first, and what takes memory last."""
        run, stage, recipe = self.run, self.stage, self.recipe
        mend = "see to its room and rights, or choose another --out"
        with together(), telling(run.out, "cannot be written", mend=mend):
            run.out.mkdir(parents=True, exist_ok=True)
        with together():
            self._samples = stage.samples(run.sources, split="train")
            held_out = stage.samples(run.sources, split="test")
            sets = _digests(run.sources)
        check_agreement(
            {"samples": len(self._samples), "held-out samples": len(held_out), INFO_FILE: sets}
        )
        about = run.about()
        for number, digest in sets.items():
            about["data"][number]["content"] = digest
        self._checkpoints = Checkpoints(
            run.out / "checkpoints",
            run_config=about,
            keep_last=recipe.keep_last,
            best_mode=stage.best[1],
        )
        opened.callback(self._checkpoints.close)
        steps = self._checkpoints.steps()
        if steps:
            self._saved = self._checkpoints.check()
        with together():
            networks = stage.load(run.bundle, mesh=run.mesh)
        self._flops = _sample_flops(stage, networks)
        self.state = make_state(networks, stage, self._optimizer, mesh=run.mesh)
        del networks
        with together():
            self._held_out = _HeldOut(stage, held_out, run.mesh)
        self._batches = _Batches(self._iterator(), run.mesh)
        opened.callback(self._batches.close)
        if steps:
            self.state, position = self._checkpoints.restore(self.state)
            self._batches.restore(position)
        self.step = int(self.state.step)
        shardings = state_shardings(self.state, run.mesh)
        self._step = make_train_step(stage, self._optimizer, shardings=shardings)
        with together():
            self._recorder = Recorder(run.out, step=self.step, steps=recipe.steps, name=stage.name)
        opened.callback(self._recorder.close)
        self._say_start()
        looked = not steps or self.step in self._checkpoints.scores
        if not looked and self._due(recipe.watch_every):  # the run ended in its look
            self._watch()

    def _iterator(self) -> Any:
        return make_iterator(
            self._samples,
            batch_size=self.recipe.batch_size,
            seed=self.recipe.seed,
            num_threads=self.run.threads,
            mesh=self.run.mesh,
        )

    def _say_start(self) -> None:
        trained = sum(x.size for x in jax.tree.leaves(self.state.params))
        frozen = sum(x.size for x in jax.tree.leaves(self.state.frozen))
        done = f", {self.step} of them done before" if self.step else ""
        self._recorder.say(
            f"{self.stage.name}: {self.recipe.steps} steps of {self.recipe.batch_size} "
            f"{self.stage.unit}{done}; {trained:,} weights are trained, {frozen:,} frozen"
        )

    def advance(self) -> None:
        """One step, and what is due after it."""
        start = time.perf_counter()
        batch, position = self._batches.current(), self._batches.position
        with jax.set_mesh(self.run.mesh):
            self.state, metrics = self._step(self.state, batch, self._key)
        unread, finite = None, False
        try:
            with together():
                try:
                    self._batches.advance()  # while the devices compute
                finally:
                    finite = bool(metrics.pop("finite"))
        except UserError as error:  # the next batch cannot be read: this step is done
            unread = error
        if not finite:
            raise self._not_finite(batch, position)
        self._clock.add(time.perf_counter() - start)
        self.step += 1
        self._score = None
        self._recorder.advance(self.step)
        if self._due(self.recipe.log_every):
            self._log(metrics)
        if unread is not None and self.step < self.recipe.steps:
            self._keep(self._batches.position)
            raise unread
        if self._due(self.recipe.save_every):
            self._save(self._batches.position)
        if self._due(self.recipe.watch_every):
            if self._saved == self.step:  # on disk: a look may need more memory than there is
                self._checkpoints.wait()
            self._watch()

    def _due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.recipe.steps

    def _not_finite(self, batch: Any, position: Any) -> NonFiniteError:
        """The state is as it was before the step: it is saved, and the culprit told."""
        with jax.set_mesh(self.run.mesh):
            name = first_bad_tensor(self.stage, self.state, batch, self._key)
        self._keep(position)
        self._checkpoints.close()
        return NonFiniteError(
            f"step {self.step + 1}: {name} is not finite: stopped; the state before it is in "
            f"{self.run.out}/checkpoints/{self.step}: a smaller learning rate or float32 may help, "
            "from the start: with --start anew, or another --out"
        )

    def _log(self, metrics: Mapping[str, jax.Array]) -> None:
        scalars = {name: float(value) for name, value in metrics.items()}
        rate = self._clock.rate()
        if rate is not None:
            chips = self.run.mesh.size
            samples = rate * self.recipe.batch_size
            scalars["steps_per_second"] = rate
            scalars["goodput"] = self._clock.goodput()
            scalars[f"{self.stage.unit}_per_second_per_chip"] = samples / chips
            peak = peak_tflops(self.run.peak)
            if self._flops is not None and peak is not None:
                scalars["mfu"] = utilization(
                    sample_flops=self._flops, samples_per_second=samples, chips=chips, peak=peak
                )
            self._say_formula(samples, peak, scalars.get("mfu"))
        with together():
            self._recorder.log(self.step, scalars, steps_per_second=rate)

    def _say_formula(self, samples: float, peak: float | None, mfu: float | None) -> None:
        if self._told_formula:
            return
        self._told_formula = True
        kind = jax.devices()[0].device_kind
        flops = "n/a" if self._flops is None else f"{self._flops:.4g}"
        top = f"n/a for {kind!r}: give --peak-tflops" if peak is None else f"{peak * 1e12:.4g}"
        answer = "n/a" if mfu is None else f"{100 * mfu:.1f} %"
        self._recorder.say(
            f"MFU = FLOP of a {self.stage.unit.removesuffix('s')}'s step x {self.stage.unit} a "
            f"second / (chips x peak FLOP/s) = {flops} x {samples:.4g} / ({self.run.mesh.size} x "
            f"{top}) = {answer}"
        )

    def _watch(self) -> None:
        with jax.set_mesh(self.run.mesh):
            watched = self._held_out.look(self.state, self._watch_key)
        name = self.stage.best[0]
        if name not in watched.scalars:
            raise ValueError(f"stage {self.stage.name}: no score {name!r} in {watched.scalars}")
        self._score = watched.scalars[name]
        with together():
            self._recorder.watched(self.step, watched)
            if self._saved == self.step:
                self._recorder.copy()
                self._checkpoints.set_score(self.step, self._score)

    def _save(self, position: Any) -> None:
        self._checkpoints.save(self.state, position)
        self._saved = self.step
        with together():
            self._recorder.copy()
            if self._score is not None:  # it was looked at before
                self._checkpoints.set_score(self.step, self._score)

    def _keep(self, position: Any) -> None:
        """Saves what is not yet saved, and waits until it is on disk."""
        if self._saved != self.step:
            self._save(position)
        self._checkpoints.wait()

    def leave(self, signals: _Signals) -> int:
        """Saves after a signal, and says how to go on."""
        self._keep(self._batches.position)
        interrupted = signals.number == signal.SIGINT
        self._recorder.say(
            f"{self.stage.name}: {'Ctrl-C' if interrupted else 'SIGTERM'} after step {self.step} "
            f"of {self.recipe.steps}: saved in {self.run.out}; the same command goes on from there"
        )
        return 130 if interrupted else 0

    def finish(self) -> None:
        """Writes the result: `model/`, the bundle for the next stage."""
        self._checkpoints.wait()
        chosen = "" if self.run.result == "last" else f", {self._take_best()}"
        iterator = self._iterator()
        batches = (on_mesh(batch, self.run.mesh) for batch in iterator)
        try:
            with jax.set_mesh(self.run.mesh):
                configs = self.stage.finish(averaged(self.state), batches)
        finally:
            iterator.close()
        path = self.run.out / "model"
        write_result(path, self.state, stage=self.stage, bundle=self.run.bundle, configs=configs)
        goodput = f"{self._clock.goodput():.0%} of the time in steps"
        self._recorder.say(f"{self.stage.name}: done: {path} ({goodput}{chosen})")

    def _take_best(self) -> str:
        """Makes the best checkpoint's state the run's own, and tells which it is."""
        name, best = self.stage.best[0], self._checkpoints.best_step()
        if best is None:
            return f"of the last step: no checkpoint has a finite {name}"
        if best != self.step:
            self.state, _ = self._checkpoints.restore(self.state, step=best)
        return f"of step {best}, the best: {name} {self._checkpoints.scores[best]:.4g}"


def _digests(sources: tuple[DataSource, ...]) -> dict[str, str]:
    """Of what the data sets say of themselves; empty for one that says nothing."""
    found = {}
    for number, source in enumerate(sources):
        file = absolute(source.path) / INFO_FILE
        with telling(file, "cannot be read", mend="copy or make the set again"):
            content = file.read_bytes() if file.exists() else b""
        found[f"{number}"] = hashlib.sha256(content).hexdigest()[:12] if content else ""
    return found


def _sample_flops(stage: Stage[Any], networks: dict[str, nnx.Module]) -> float | None:
    try:
        return stage.sample_flops(networks)
    except NotImplementedError:
        return None
