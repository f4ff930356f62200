"""`animegamer evaluate`: the options, and which of its two functions they are for."""

from collections.abc import Callable, Sequence
from typing import Annotated

import tyro

from animegamer_jax.devices import keep_compiled_programs
from animegamer_jax.evaluate.options import JudgeOptions, Options


class _Command:
    """`for_words(words)` is the function that takes the options: --make has others."""

    def for_words(self, words: Sequence[str]) -> Callable[..., int]:
        """The function whose arguments are the command's options."""
        if any(word.partition("=")[0] == "--make" for word in words):
            from animegamer_jax.evaluate.benchmarks.command import make_command

            return make_command
        return run


def run(
    options: Annotated[Options, tyro.conf.arg(name="")],
    judge: Annotated[JudgeOptions, tyro.conf.arg(name="")],
) -> int:
    """Play a benchmark, score it and write a report. With --make: write a benchmark instead.

    Args:
        options: what is played and how it is scored.
        judge: who else scores it.

    Returns:
        The exit status, 0.

    Raises:
        UserError: a wrong option, benchmark, model or folder.
    """
    keep_compiled_programs()
    from animegamer_jax.evaluate.evaluation import Run

    Run(options, judge).run()
    return 0


evaluate = _Command()
