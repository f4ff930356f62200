"""`animegamer serve`: serves the page until it is stopped."""

import os
import signal
import socket
import threading
from pathlib import Path

from rich.console import Console

from animegamer_jax.bundle.embedded import model_folder
from animegamer_jax.configs import Dtype
from animegamer_jax.devices import keep_compiled_programs
from animegamer_jax.errors import UserError
from animegamer_jax.game.saved_game import History


def serve(
    *,
    model: str = "toy",
    host: str = "127.0.0.1",
    port: int = 7860,
    max_games: int = 64,
    games: Path = Path("out/serve"),
    steps: int | None = None,
    dtype: Dtype | None = None,
    history: History | None = None,
    auth: tuple[str, ...] = (),
    warm_up: bool = True,
) -> int:
    """Serve the game as a web page, with an API.

    Args:
        model: Model folder, as `animegamer convert` writes it, or `toy` for the embedded model.
        host: Address to serve the page on; 0.0.0.0 for all addresses of this machine.
        port: Port of the page, 0 to 65535; 0 for any free port.
        max_games: Largest number of open games. A game that has been idle for half an hour is
            closed when another needs its place, and opened again when its player returns.
        games: Folder of all games, which are saved after every turn.
        steps: Denoising steps a turn of new games, 1 to 1000. Default: the model's own.
        dtype: Number format of the computation. Default: the model's own.
        history: Past shots as the model sees them: as it `predicted` them, or as they were `shown`:
            encoded from the first frame of each clip. Default: the model's own.
        auth: Accounts that may play, each as name:password. Default: everyone may play.
        warm_up: Compile the programs of all batch sizes before the first player comes.
    """
    pairs = _read_auth(auth)
    for option, value, low, high in (
        ("--port", port, 0, 65535),
        ("--max-games", max_games, 1, 100_000),
        ("--steps", steps, 1, 1000),
    ):
        if value is not None and not low <= value <= high:
            raise UserError(f"{option}: expected a whole number, {low} to {high}, found {value}")
    folder = model_folder(model)
    port = _check_port(host, port)
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    keep_compiled_programs()

    import gradio as gr

    from animegamer_jax.bundle.bundle import Bundle
    from animegamer_jax.game.player import Player
    from animegamer_jax.media.video import enlarged_size
    from animegamer_jax.serve import view
    from animegamer_jax.serve.engine import Engine, suitable_batches
    from animegamer_jax.serve.game_store import GameModel, GameStore
    from animegamer_jax.serve.page import Page

    console = Console(highlight=False, markup=False, soft_wrap=True)
    bundle = Bundle.open(folder)
    vocabulary = bundle.vocabulary
    player = Player.from_bundle(bundle, steps=steps, dtype=dtype, history=history)
    mllm = player.networks.mllm.config
    game_model = GameModel(
        name=bundle.name,
        protocol=bundle.protocol.name,
        representation=(mllm.num_queries, mllm.representation_size),
        clip=(*enlarged_size(player.height, player.width), player.num_frames),
        history=player.protocol.history,
    )
    store = GameStore(games, model=game_model, max_games=max_games)
    batch_sizes, workers = suitable_batches()
    engine = Engine(player, store, batch_sizes=batch_sizes, workers=workers)
    if warm_up:
        engine.warm_up(lambda size: console.print(f"compiling for {size} games at once"))
    page = Page(
        engine, vocabulary=vocabulary, steps=player.steps, title=f"AnimeGamer: {bundle.name}"
    )
    blocks = page.build()
    fonts = ["system-ui", "-apple-system", "Segoe UI", "sans-serif"]
    mono = ["ui-monospace", "Consolas", "monospace"]
    stopped = _catch_signals()
    try:
        blocks.queue(default_concurrency_limit=None, max_size=4 * max_games)
        blocks.launch(
            server_name=host,
            server_port=port,
            auth=pairs or None,
            css=view.CSS,
            theme=gr.themes.Soft(font=fonts, font_mono=mono),
            footer_links=["api"],
            max_file_size="256mb",
            max_threads=max(40, 2 * max_games),
            prevent_thread_lock=True,
            quiet=True,
            ssr_mode=False,
            show_error=True,
        )
        shown = f"[{host}]" if ":" in host else host
        console.print(f"{bundle.name} is served on http://{shown}:{port}  (Ctrl-C stops it)")
        console.print(f"games are saved in {games}")
        stopped.wait()
    finally:
        engine.close()
        blocks.close(verbose=False)
    console.print("stopped; every finished turn is saved")
    return 0


def _catch_signals() -> threading.Event:
    """Returns an event that Ctrl-C and SIGTERM set, so that the server can shut down in order."""
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    return stopped


def _read_auth(pairs: tuple[str, ...]) -> list[tuple[str, str]]:
    found = []
    for pair in pairs:
        name, colon, password = pair.partition(":")
        if not (name and colon and password):
            raise UserError("--auth: expected name:password, found something else")
        found.append((name, password))
    return found


def _check_port(host: str, port: int) -> int:
    """Returns a free port on the host: the given one, or any for 0.

    Raises:
        UserError: the port is taken or may not be used, or the host is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            return probe.getsockname()[1]
    except OSError as error:
        raise UserError(
            f"--host {host} --port {port}: cannot serve there: {error.strerror or error}: "
            "choose another --port, or an address of this machine"
        ) from error
