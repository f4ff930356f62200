"""The training loop of every stage: restore, step, log, evaluate, save, finish."""

import contextlib
import dataclasses
import signal
from typing import Any

import grain
import jax
from etils import epath

from animegamer_jax.data.datasets import INFO_FILE
from animegamer_jax.data.loader import Batch, PrefetchedBatches, make_iterator, on_mesh
from animegamer_jax.distributed import check_agreement, raise_on_all_hosts
from animegamer_jax.errors import NonFiniteError, UserError
from animegamer_jax.storage.paths import user_errors
from animegamer_jax.train.checkpoint import Checkpoints
from animegamer_jax.train.evaluation import Evaluator
from animegamer_jax.train.metric_logger import MetricLogger, Throughput
from animegamer_jax.train.optimizer import make_schedule
from animegamer_jax.train.result import write_result
from animegamer_jax.train.run import TrainingRun
from animegamer_jax.train.signals import StopSignals
from animegamer_jax.train.stages.base import Stage
from animegamer_jax.train.step import (
    StepFunction,
    TrainState,
    averaged,
    first_bad_tensor,
    make_state,
    make_train_step,
    stage_optimizer,
    state_shardings,
)


def train(run: TrainingRun) -> int:
    """Trains a stage to its recipe's last step, from the last checkpoint if there is one.

    Returns:
        The exit status: 0, also after a SIGTERM, since the same command resumes the run; 130 after
        Ctrl-C, on the host that received it.

    Raises:
        UserError: Bad data, another configuration than the checkpoint's, a full disk.
        NonFiniteError: A loss or a gradient is NaN or infinite.
    """
    recipe = run.stage.recipe
    with contextlib.ExitStack() as resources:
        session = _restore(run, resources)
        signals = resources.enter_context(StopSignals())
        if (
            session.resumed
            and session.due(recipe.eval_every)
            and session.step not in session.checkpoints.scores
        ):
            session.evaluate()  # the run was interrupted here
        if session.step < recipe.steps:
            with raise_on_all_hosts():
                session.batches.advance()
        while session.step < recipe.steps:
            batch, position = session.batches.batch, session.batches.position
            with session.throughput.step():
                with jax.set_mesh(run.mesh):
                    session.state, metrics = session.train_step(session.state, batch, session.key)
                unread = _read_next(session.batches)  # while the devices compute
                finite = bool(metrics.pop("finite"))
            if not finite:  # the state is the one before the step
                session.save(position, wait=True)
                raise _non_finite(run, session.state, batch, session.key)
            session.step += 1
            if session.due(recipe.log_every):
                session.logger.log(session.step, metrics | session.throughput.rates())
            session.logger.advance(session.step)
            if unread is not None and session.step < recipe.steps:
                session.save(session.batches.position, wait=True)
                raise unread
            if session.due(recipe.save_every):
                session.save(session.batches.position)
                session.logger.copy()
            if session.due(recipe.eval_every):
                session.evaluate()
            if signals.received(session.step):
                session.save(session.batches.position, wait=True)
                interrupted = signals.number == signal.SIGINT
                session.logger.print(
                    f"{run.stage.name}: {'Ctrl-C' if interrupted else 'SIGTERM'} after step "
                    f"{session.step} of {recipe.steps}: saved in {run.out}; the same command "
                    "resumes from there"
                )
                return 130 if interrupted else 0
        session.checkpoints.wait()
        _finish(session)
    return 0


@dataclasses.dataclass(kw_only=True)
class _Session:
    """A training in progress: its state, what it reads and what it writes."""

    run: TrainingRun
    key: jax.Array
    eval_key: jax.Array
    state: TrainState
    step: int
    resumed: bool
    samples: grain.MapDataset[Any]
    batches: PrefetchedBatches
    checkpoints: Checkpoints
    evaluator: Evaluator
    train_step: StepFunction
    throughput: Throughput
    logger: MetricLogger

    def due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.run.stage.recipe.steps

    def save(self, position: Any, *, wait: bool = False) -> None:
        self.checkpoints.save(self.state, position)
        if wait:
            self.checkpoints.wait()

    def evaluate(self) -> None:
        self.checkpoints.wait()  # on disk first: an evaluation may run out of memory
        evaluation = self.evaluator.evaluate(self.state, self.eval_key)
        self.logger.log_evaluation(self.step, evaluation)
        self.logger.copy()
        self.checkpoints.set_score(self.step, evaluation.scalars[self.run.stage.best[0]])


def _restore(run: TrainingRun, resources: contextlib.ExitStack) -> _Session:
    """Opens data, checkpoints, networks and logs, and restores the last checkpoint if there is one.

    What a user can get wrong (data, checkpoints, networks) comes first.

    Raises:
        UserError: Bad data, another configuration than the checkpoint's, files that cannot be
            written.
    """
    stage, recipe, mesh = run.stage, run.stage.recipe, run.mesh
    key, eval_key = jax.random.split(jax.random.key(recipe.seed))
    samples, held_out, run_config = _open_data(run)
    checkpoints = Checkpoints(
        run.out / "checkpoints",
        run_config=run_config,
        keep_last=recipe.keep_last,
        best_mode=stage.best[1],
    )
    resources.callback(checkpoints.close)
    resumed = bool(checkpoints.steps())
    if resumed:
        checkpoints.check()
    with raise_on_all_hosts():
        networks = stage.load(run.bundle, mesh=mesh)
    throughput = Throughput(
        unit=stage.unit,
        batch_size=recipe.batch_size,
        sample_flops=stage.sample_flops(networks),
        chips=mesh.size,
        peak_tflops=run.peak_tflops,
    )
    optimizer = stage_optimizer(stage)
    state = make_state(networks, stage, optimizer, mesh=mesh)
    del networks
    with raise_on_all_hosts():
        evaluator = Evaluator(stage, held_out, mesh)
    batches = PrefetchedBatches(_make_iterator(run, samples), mesh)
    resources.callback(batches.close)
    if resumed:
        state, position = checkpoints.restore(state)
        batches.restore(position)
    step = int(state.step)
    with raise_on_all_hosts():
        logger = MetricLogger(
            run.out,
            step=step,
            steps=recipe.steps,
            name=stage.name,
            evaluated=step in checkpoints.scores,
        )
    resources.callback(logger.close)
    logger.print(_describe(state, stage))
    if (before := checkpoints.extended_from) is not None:
        logger.print(_describe_extension(stage, step=step, before=before))
    logger.print(throughput.formula())
    return _Session(
        run=run,
        key=key,
        eval_key=eval_key,
        state=state,
        step=step,
        resumed=resumed,
        samples=samples,
        batches=batches,
        checkpoints=checkpoints,
        evaluator=evaluator,
        train_step=make_train_step(stage, optimizer, shardings=state_shardings(state, mesh)),
        throughput=throughput,
        logger=logger,
    )


def _open_data(
    run: TrainingRun,
) -> tuple[grain.MapDataset[Any], grain.MapDataset[Any], dict[str, Any]]:
    """Returns training samples, held-out samples and the run's configuration with data digests."""
    hint = "check its free space and permissions, or choose another --out"
    with raise_on_all_hosts(), user_errors(run.out, "cannot be written", hint=hint):
        run.out.mkdir(parents=True, exist_ok=True)
    with raise_on_all_hosts():
        samples = run.stage.samples(run.sources, split="train")
        held_out = run.stage.samples(run.sources, split="test")
        digests = run.data_digests()
    check_agreement(
        {"samples": len(samples), "held-out samples": len(held_out), INFO_FILE: digests}
    )
    config = run.run_config()
    for number, digest in digests.items():
        config["data"][number]["content"] = digest
    return samples, held_out, config


def _make_iterator(
    run: TrainingRun, samples: grain.MapDataset[Any]
) -> grain.DatasetIterator[Batch]:
    recipe = run.stage.recipe
    return make_iterator(
        samples,
        batch_size=recipe.batch_size,
        seed=recipe.seed,
        num_threads=run.threads,
        mesh=run.mesh,
    )


def _read_next(batches: PrefetchedBatches) -> UserError | None:
    """Reads the next batch; returns the error if any host cannot read it."""
    try:
        with raise_on_all_hosts():
            batches.advance()
    except UserError as error:
        return error
    return None


def _describe(state: TrainState, stage: Stage[Any]) -> str:
    recipe = stage.recipe
    trained = sum(x.size for x in jax.tree.leaves(state.params))
    frozen = sum(x.size for x in jax.tree.leaves(state.frozen))
    done = f", {int(state.step)} of them done before" if state.step else ""
    return (
        f"{stage.name}: {recipe.steps} steps of {recipe.batch_size} {stage.unit}{done}; "
        f"{trained:,} weights are trained, {frozen:,} frozen"
    )


def _describe_extension(stage: Stage[Any], *, step: int, before: int) -> str:
    """Describes how the learning rate changes in a run that continues with more steps."""
    recipe = stage.recipe
    rates = (make_schedule(recipe.optimizer, steps=steps) for steps in (before, recipe.steps))
    old, new = (float(jax.numpy.asarray(rate(step))) for rate in rates)
    return (
        f"{stage.name}: made longer, from {before} to {recipe.steps} steps: the learning rate's "
        f"cosine now ends there, so the rate of step {step + 1} is {new:.3g} instead of {old:.3g}"
    )


def _non_finite(run: TrainingRun, state: TrainState, batch: Any, key: jax.Array) -> NonFiniteError:
    """Names the tensor that made the step after `state` fail."""
    with jax.set_mesh(run.mesh):
        name = first_bad_tensor(run.stage, state, batch, key)
    step = int(state.step)
    return NonFiniteError(
        f"step {step + 1}: {name} is not finite: stopped; the state before it is in "
        f"{run.out}/checkpoints/{step}: a smaller learning rate or float32 may help, from the "
        "start: with --start fresh, or another --out"
    )


def _finish(session: _Session) -> None:
    """Writes model/, of the last step or the best one, and says which."""
    run, exported = session.run, ""
    if run.export_checkpoint == "best":
        session.state, exported = _restore_best(session.state, run.stage, session.checkpoints)
    path = _export(run, session.state, session.samples)
    goodput = session.logger.describe_goodput(session.throughput.goodput())
    session.logger.print(f"{run.stage.name}: done: {path} ({goodput}{exported})")


def _restore_best(
    state: TrainState, stage: Stage[Any], checkpoints: Checkpoints
) -> tuple[TrainState, str]:
    """Returns the best checkpoint's state, and which one that is."""
    name, best = stage.best[0], checkpoints.best_step()
    if best is None:
        return state, f", of the last step: no checkpoint has a finite {name}"
    if best != int(state.step):
        state, _ = checkpoints.restore(state, step=best)
    return state, f", of step {best}, the best: {name} {checkpoints.scores[best]:.4g}"


def _export(run: TrainingRun, state: TrainState, samples: grain.MapDataset[Any]) -> epath.Path:
    """Writes model/, the bundle for the next stage."""
    with contextlib.closing(_make_iterator(run, samples)) as iterator, jax.set_mesh(run.mesh):
        batches = (on_mesh(batch, run.mesh) for batch in iterator)
        configs = run.stage.finish(averaged(state), batches)
    path = run.out / "model"
    write_result(path, state, stage=run.stage, bundle=run.bundle, configs=configs)
    return path
