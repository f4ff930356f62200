"""The systems that an evaluation compares, as its options name them."""

from pathlib import Path
from typing import Any

from animegamer_jax.bundle.bundle import Bundle
from animegamer_jax.evaluate.benchmarks.format import Benchmark, check_characters
from animegamer_jax.evaluate.options import Options
from animegamer_jax.evaluate.play_games import check_instructions
from animegamer_jax.game.loading import check_fit
from animegamer_jax.game.pictures import check_networks, check_window
from animegamer_jax.game.saved.turns import History
from animegamer_jax.tokenizer import Tokenizer


class Source:
    """A system as the command line names it: NAME=DIR, or DIR."""

    def __init__(
        self,
        word: str,
        *,
        played: bool,
        window: int | None = None,
        history: History | None = None,
    ):
        name, equals, path = word.partition("=")
        if not equals or "/" in name or Path(word).exists():
            name, path = "", word
        self.path, self.played, self.window = path, played, window
        self.history: History | None = history
        self.name = name or (path if path == "toy" else Path(path).resolve().name)


def choose_sources(options: Options) -> tuple[Source, ...]:
    """Returns the systems, each with a name of its own; one per model, window and history."""
    models = options.model or (() if options.played else ("toy",))
    found = []
    for word in models:
        for window in options.window or (None,):
            for history in options.history or (None,):
                source = Source(word, played=False, window=window, history=history)
                source.name += f"-window-{window}" if len(options.window) > 1 else ""
                source.name += f"-{history}" if len(options.history) > 1 else ""
                found.append(source)
    found += [Source(word, played=True) for word in options.played]
    for index, source in enumerate(found):
        taken = {other.name for other in found[:index]}
        if source.name in taken:
            source.name = next(
                name for n in range(2, 99) if (name := f"{source.name}-{n}") not in taken
            )
    return tuple(found)


def check_model(source: Source, benchmark: Benchmark) -> None:
    """Checks, before anything is played, that a model can play the benchmark.

    Raises:
        UserError: There is no such model, it cannot play, its vocabulary lacks a character's name,
            or an instruction is too long; or games begin with a picture, which it cannot see.
    """
    bundle = Bundle.open(source.path)
    protocol = bundle.protocol
    history = source.history or protocol.history
    check_fit(bundle.config, history=history, picture_first=protocol.picture_first)
    if any(game.picture is not None for game in benchmark.games):
        check_window(source.window or protocol.window)
        check_networks(bundle.config, name=source.name)
    mllm: Any = bundle.config.mllm
    tokenizer = Tokenizer.load(
        bundle.tokenizer_dir, vocab_size=mllm.mistral.vocab_size, num_queries=mllm.num_queries
    )
    known = [name for name in benchmark.characters if not tokenizer.unknown_words(name)]
    check_characters(benchmark, known, model=f"model {source.name}")
    length = protocol.caption_length
    check_instructions(benchmark, lambda text: tokenizer.caption(text, length))


def notes_on_names(benchmark: Benchmark, tokenizer: Tokenizer) -> tuple[str, ...]:
    """Returns a note if nothing checked that the model knows the benchmark's characters."""
    if tokenizer.unknown_words("qzxv"):  # a closed vocabulary: names were checked
        return ()
    return (
        "The model's tokenizer can read any name, so nothing checked whether the model was trained "
        f"on the benchmark's characters ({', '.join(benchmark.characters[:5])}…).",
    )
