"""`animegamer calibrate`: chooses denoising steps that a model can skip."""

from pathlib import Path

from animegamer_jax.bundle.embedded import model_folder
from animegamer_jax.configs import Dtype
from animegamer_jax.devices import keep_compiled_programs
from animegamer_jax.errors import UserError, check_between
from animegamer_jax.game.instructions import read_instructions


def calibrate(
    instructions: Path,
    out: Path,
    *,
    model: str = "toy",
    steps: int | None = None,
    times_fewer: float = 2.0,
    dtype: Dtype | None = None,
) -> int:
    """Measure what a skipped denoising step costs; write a file of steps to skip.

    Args:
        instructions: UTF-8 file with one instruction a line, which are played to measure.
        out: File to write, for the option --skip of play, evaluate, bench and plan.
        model: Model folder, or `toy` for the embedded model.
        steps: Denoising steps a turn. Default: the model's own.
        times_fewer: Factor by which to reduce the decoder's evaluations per turn.
        dtype: Number format of the computation. Default: the model's own.

    Raises:
        UserError: A number or the model does not fit, or a file cannot be read or written.
    """
    if not 1 <= times_fewer < float("inf"):
        raise UserError(f"--times-fewer {times_fewer}: expected a number of 1 or more")
    check_between("--steps", steps, 1, 1000)
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: expected a file in an existing folder")
    lines = [line.text for line in read_instructions(instructions)]
    folder = model_folder(model)
    keep_compiled_programs()
    from animegamer_jax.bundle.bundle import Bundle
    from animegamer_jax.game import skipped_steps
    from animegamer_jax.game.player import Player

    bundle = Bundle.open(folder)
    player = Player.from_bundle(bundle, steps=steps, dtype=dtype)
    found = skipped_steps.calibrate(player, bundle, lines, times_fewer=times_fewer)
    found.save(out)
    shown = " ".join(map(str, found.rows))
    print(
        f"{out}: {found.evaluations} evaluations in {found.steps} steps, {found.speedup:.2f} times "
        f"fewer; expected error of the latents {found.error:.2g} (RMS)\n"
        f"rows evaluated in each step: {shown}"
    )
    return 0
