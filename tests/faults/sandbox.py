"""Runs a function in a forked child: what it printed, how it ended, what it took, what it opened.

The parent has imported everything and started no thread and no JAX backend, so that a child starts
in milliseconds. `file_faults.c` is preloaded into the parent (`preload`), and set in the child.
"""

import contextlib
import ctypes
import dataclasses
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

OFF, COUNT, KILL, KILL_IN_WRITE, FAIL = range(5)
_SOURCE = Path(__file__).with_name("file_faults.c")
_MARK = "FILE_FAULTS"
_SPARE = 3 << 30  # bytes of addresses that a child may take, so that it cannot fill the machine
_IDLE = 20.0  # seconds without any CPU time: the child waits for ever
_WALL = 30  # times the limit of CPU seconds, however busy the machine is


def preload() -> None:
    """Starts this program again with `file_faults.c` preloaded, unless it is."""
    if os.environ.get(_MARK):
        return
    library = Path(tempfile.mkdtemp(prefix="file-faults-")) / "file_faults.so"
    command = ["cc", "-O2", "-w", "-shared", "-fPIC", "-o", library, _SOURCE, "-ldl"]
    subprocess.run(command, check=True)
    settings = {_MARK: str(library), "LD_PRELOAD": str(library), "OPENBLAS_NUM_THREADS": "1"}
    settings |= {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | settings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileFaults:
    """What the preloaded library does in a child.

    Attributes:
        root: Folder below which file operations count.
        mode: OFF, COUNT, KILL, KILL_IN_WRITE or FAIL.
        at: Number of the operation that is hit, from 1.
        errno: Error number, for FAIL.
        forbidden: Folder of which no file may be opened.
        allowed: Folders below which files may be written.
        log: File in which operations are noted.
    """

    root: Path | None = None
    mode: int = OFF
    at: int = 0
    errno: int = 0
    forbidden: Path | None = None
    allowed: tuple[Path, ...] = ()
    log: Path | None = None

    def apply(self) -> None:
        library = ctypes.CDLL(os.environ[_MARK])

        def put(name: str, text: object, place: int = 0) -> None:
            buffer = (ctypes.c_char * 4096 * 4).in_dll(library, name)
            buffer[place].value = os.fsencode(str(text))

        def put_one(name: str, text: object) -> None:
            (ctypes.c_char * 4096).in_dll(library, name).value = os.fsencode(str(text))

        for place, folder in enumerate(self.allowed):
            put("faults_allowed", folder, place)
        for name in ("root", "forbidden", "log"):
            if (value := getattr(self, name)) is not None:
                put_one(f"faults_{name}", value)
        ctypes.c_long.in_dll(library, "faults_at").value = self.at
        ctypes.c_int.in_dll(library, "faults_errno").value = self.errno
        ctypes.c_int.in_dll(library, "faults_mode").value = self.mode


def _found() -> str:
    library = ctypes.CDLL(os.environ[_MARK])
    (ctypes.c_int).in_dll(library, "faults_mode").value = OFF
    return os.fsdecode((ctypes.c_char * 4096).in_dll(library, "faults_found").value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a child ended.

    Attributes:
        status: Exit status; negative: the number of the signal that ended it.
        out, err: What it printed.
        seconds: CPU time.
        wall: Seconds on the clock.
        megabytes: Largest resident memory above that at its start.
        timed_out: Whether a limit of time ended it.
        opened: What it opened against the rules, or "".
    """

    status: int
    out: str
    err: str
    seconds: float
    wall: float
    megabytes: float
    timed_out: bool
    opened: str


class Child:
    """A function that runs in a forked process.

    Args:
        function: Returns the exit status.
        folder: Folder for what the child prints; it is made.
        faults: What happens to its file operations.
        seconds: CPU time after which it is ended.
        idle: Seconds without any CPU time after which it is ended.
    """

    def __init__(
        self,
        function: Callable[[], int],
        folder: Path,
        *,
        faults: FileFaults | None = None,
        seconds: float = 10,
        idle: float = _IDLE,
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.seconds, self.idle = folder, seconds, idle
        self.start = time.monotonic()
        self.outcome: Outcome | None = None
        self._ended_late = False
        self._progress = self.start, ""
        sys.stdout.flush(), sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._run(function, faults)

    def _run(self, function: Callable[[], int], faults: FileFaults | None) -> None:
        status = 1
        try:
            os.setpgid(0, 0)
            for number, name in enumerate(("out", "err"), start=1):
                handle = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
                os.dup2(handle, number)
                os.close(handle)
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)
            os.close(nothing)
            sys.stdin = open(0, closefd=False)  # noqa: SIM115
            sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
            signal.signal(signal.SIGINT, signal.default_int_handler)
            (self.folder / "baseline").write_text(f"{_resident()}")
            _lower(resource.RLIMIT_AS, _addresses() + _SPARE)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            _lower(resource.RLIMIT_CPU, int(self.seconds) + 1)
            if faults is not None:
                faults.apply()
            status = function()
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                if faults is not None and (found := _found()):
                    (self.folder / "opened").write_text(found)
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status & 0xFF)

    def poll(self) -> bool:
        """Returns whether the child has ended; ends it if it waits too long."""
        if self.outcome is not None:
            return True
        pid, status, used = os.wait4(self.pid, os.WNOHANG)
        if pid == 0:
            now, spent = time.monotonic(), _spent(self.pid)
            if spent != self._progress[1]:
                self._progress = now, spent
            if now - self._progress[0] > self.idle or now - self.start > _WALL * self.seconds:
                self._ended_late = True
                os.kill(self.pid, signal.SIGKILL)
            return False
        with contextlib.suppress(OSError):  # processes that it left behind
            os.killpg(self.pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(status)
        spent = used.ru_utime + used.ru_stime
        opened, baseline = self.folder / "opened", float(_text(self.folder / "baseline") or 0)
        self.outcome = Outcome(
            status=code,
            out=_text(self.folder / "out"),
            err=_text(self.folder / "err"),
            seconds=spent,
            wall=time.monotonic() - self.start,
            megabytes=max(0.0, used.ru_maxrss / 1024 - baseline),
            timed_out=self._ended_late or spent >= self.seconds,
            opened=opened.read_text() if opened.exists() else "",
        )
        return True

    def wait(self) -> Outcome:
        """Returns how the child ended, once it has."""
        while not self.poll():
            time.sleep(0.003)
        assert self.outcome is not None
        return self.outcome


def run_all(make: Iterator[Callable[[], Child]], *, jobs: int) -> Iterator[Child]:
    """Runs children, `jobs` at a time, and yields each as it ends."""
    running: list[Child] = []
    for start in make:
        running.append(start())
        while len(running) >= jobs:
            yield from _ended(running)
    while running:
        yield from _ended(running)


def _ended(running: list[Child]) -> Iterator[Child]:
    done = [child for child in running if child.poll()]
    for child in done:
        running.remove(child)
    if not done:
        time.sleep(0.003)
    yield from done


def _text(path: Path) -> str:
    return path.read_bytes()[: 1 << 20].decode(errors="replace") if path.exists() else ""


def _spent(pid: int) -> str:
    """Returns the CPU time of a process and its children, in any unit."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return " ".join(fields[11:15])


def _resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def _lower(kind: int, limit: int) -> None:
    """Sets a limit of this process; a lower one, as in a child of a limited one, stays."""
    hard = resource.getrlimit(kind)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(kind, (limit, limit))


def _addresses() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
