"""`animegamer evaluate`: evaluates, or with --make writes a benchmark."""

from collections.abc import Callable, Sequence
from typing import Annotated

import tyro

from animegamer_jax.devices import keep_compiled_programs
from animegamer_jax.evaluate.options import JudgeOptions, Options
from animegamer_jax.storage.locks import only_writer


class _Command:
    """The command: `for_words(words)` returns the function that takes its options."""

    def for_words(self, words: Sequence[str]) -> Callable[..., int]:
        """Returns the function whose arguments are the options: --make has its own."""
        if any(word.partition("=")[0] == "--make" for word in words):
            from animegamer_jax.evaluate.benchmarks.command import make_command

            return make_command
        return run


def run(
    options: Annotated[Options, tyro.conf.arg(name="")],
    judge: Annotated[JudgeOptions, tyro.conf.arg(name="")],
) -> int:
    """Play a benchmark, score it and write a report.

    With --make: write a benchmark instead; `animegamer evaluate --make toy --help` lists its
    options.

    Args:
        options: What is played and how it is scored.
        judge: The models that judge it.

    Returns:
        The exit status, 0.

    Raises:
        UserError: An option, the benchmark, a model or the folder is wrong.
    """
    keep_compiled_programs()
    from animegamer_jax.evaluate.evaluation import EvaluationRun

    with only_writer(options.out):
        EvaluationRun(options, judge).run()
    return 0


evaluate = _Command()
