"""Eight simulated devices, float32 products in full precision, a warm compilation cache."""

import gc
import os
import signal
import sys
from importlib.metadata import version

# Collecting garbage goes through every module and every trace. Most of a test's objects are
# freed without it; a few large collections find the others.
gc.set_threshold(100_000, 20, 20)

# Tests start a hundred processes. Without bytecode, each would compile every module again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Tests end long before the power could fail.
os.fsync = lambda file: None

# A shell's background job starts with Ctrl-C ignored (after nohup with SIGHUP, too), and the
# processes of a test inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Compilation is most of the suite's time: LLVM's optimizations cost three times what they save,
# the emitters of fusions by way of MLIR and a module in several parts a third more. What XLA says
# to LLVM about memory is for the optimizations alone, and costs a tenth.
# XLA ends the process at a flag that it does not know: newer versions lack that of the emitters.
emitters = ["--xla_cpu_use_fusion_emitters=false"] if version("jaxlib")[:5] == "0.10." else []
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        *emitters,
        "--xla_cpu_parallel_codegen_split_count=1",
        "--xla_llvm_enable_alias_scope_metadata=false",
        "--xla_llvm_enable_noalias_metadata=false",
        "--xla_llvm_enable_invariant_load_metadata=false",
    ]
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# PyTorch and NumPy would keep a thread of each core spinning while the other worker needs it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# In the environment, for the processes that tests start as well. Programs that take less to compile
# than these seconds are not shared: most are single operations.
SHARED_FROM = "0.05"
CACHE = os.path.join(os.path.dirname(os.path.dirname(__file__)), ".jax_cache")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", CACHE)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", SHARED_FROM)
# With another precision, or another number of devices, it would be another program.
os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = PRECISION = "highest"
# Without the ten calls around each operation, programs are lowered and compiled faster.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

from pathlib import Path

import jax
import pytest

TESTS = Path(__file__).parent
ENOUGH = 2.5 * 2**30  # bytes of memory
jax.config.update("jax_default_matmul_precision", PRECISION)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)
jax.config.update("jax_persistent_cache_min_compile_time_secs", float(SHARED_FROM))

# Files that take longest. Workers take whole files, in the order in which they
# were collected: one of these at the end would keep one worker busy and the other idle.
LONGEST = (
    "data/films/test_films_to_training", "serve/page/test_page", "bench/test_bench",
    "data/films/annotation/test_annotate_again", "plan/compiled/test_compiler", "play/test_command",
    "train/stages/test_decoder", "train/stages/test_foundations", "train/test_slices",
    "train/test_command", "test_distributed", "serve/engine/test_engine", "train/test_loop",
    "serve/api/test_gradio_client", "serve/page/test_access",
)  # fmt: skip


def path_of(item: pytest.Item) -> str:
    return item.path.relative_to(TESTS).with_suffix("").as_posix()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(path_of(item), len(LONGEST)))  # stable: others stay


def pytest_collection_finish() -> None:
    """Keeps what all the imports have made out of every later collection of garbage."""
    gc.freeze()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Forgets the programs of earlier files once they fill a worker's memory."""
    if sys.platform != "linux" or (nextitem is not None and nextitem.path == item.path):
        return
    from animegamer_jax.bench.timing import read_status, release_memory

    if read_status("VmRSS") > ENOUGH:
        jax.clear_caches()
        release_memory()


SHARED = TESTS.parent.parent / "shared" / "reference"


@pytest.fixture(scope="session")
def reference() -> Path:
    """The recorded numbers of the released code, where they are next to the checkout."""
    if not SHARED.is_dir():
        pytest.skip("the reference folder is not next to this checkout")
    return SHARED


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole, random model on disk that plays by the paper's protocol, but remembers 2 turns."""
    import dataclasses

    from helpers import make_bundle

    from animegamer_jax.protocol import PAPER

    protocol = dataclasses.replace(PAPER, window=3, caption_length=96)
    return make_bundle(tmp_path_factory.mktemp("bundles") / "tiny", protocol)


@pytest.fixture(scope="session")
def shown_bundle(tmp_path_factory: pytest.TempPathFactory, tiny_bundle: Path) -> Path:
    """The same model with CLIP, which sees of its past turns what was shown."""
    import dataclasses

    from helpers import make_bundle

    from animegamer_jax.bundle.bundle import Bundle

    protocol = dataclasses.replace(Bundle.open(tiny_bundle).protocol, history="shown")
    return make_bundle(tmp_path_factory.mktemp("bundles") / "shown", protocol)
