"""Progress as it is seen on a terminal and in a log."""

import io
import sys
import time

import pytest

from animegamer_jax import progress
from animegamer_jax.progress import print_status, show_progress, track


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only where a test says so."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])

    def wait(seconds: float) -> None:
        now[0] += seconds

    return wait


def test_a_log_has_a_line_now_and_then_with_count_rate_and_time_left(clock, capsys):
    with show_progress() as show:
        show("films", 0, 256)
        for done in range(1, 23):
            clock(6.0)
            show("films", done, 256)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 11
    assert lines[-1] == "films: 22 of 256, 10/min, 0:23:24 left"


def test_one_slow_step_does_not_change_the_rate(clock, capsys):
    with show_progress() as show:
        show("steps", 0, 50)
        clock(100.0)  # a compilation
        for done in range(1, 11):
            show("steps", done, 50)
            clock(4.0)
        show("steps", 11, 50)
    assert capsys.readouterr().err.splitlines()[-1] == "steps: 10 of 50, 15/min, 0:02:40 left"


@pytest.mark.parametrize(
    ("seconds", "rate"), [(0.001, "1,000/s"), (0.4, "2.5/s"), (40, "1.5/min"), (7200, "12/day")]
)
def test_rates_are_of_a_fitting_time(clock, capsys, seconds, rate):
    step = max(1, round(2 / seconds))
    with show_progress() as show:
        for number in range(8):
            show("clips", number * step, 10**6)
            clock(step * seconds)
    last = capsys.readouterr().err.splitlines()
    assert all(f", {rate}, " in line for line in last)


def test_short_work_has_its_last_line_unless_it_leaves_nothing(capsys):
    for transient in (False, True):
        with show_progress(transient=transient) as show:
            for what in ("train games", "test games"):
                show(what, 0, 2)
                show(what, 2, 2)
    assert capsys.readouterr().err == "train games: 2 of 2\n"


def test_a_note_follows_the_numbers(clock, capsys):
    with show_progress(note=lambda: "; 3 requests") as show:
        show("films", 1, 2)
        clock(20.0)
        show("films", 1, 2)
    assert capsys.readouterr().err == "films: 1 of 2; 3 requests\n"


def test_bars_on_a_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(progress, "_SAMPLE_EVERY", 0.0)
    with show_progress() as show:
        show("films", 0, 3)
        show("a [b].mp4: seconds", 1, 60)
        time.sleep(0.02)
        show("a [b].mp4: seconds", 2, 60)
        print_status("a line above")
        show("a [b].mp4: seconds", 60, 60)
        show("films", 1, 3)
        show("c.mp4: seconds", 1, 60)
    seen = sys.stderr.getvalue()
    assert "a line above\n" in seen
    assert "/s, 0:00:0" in seen
    last = seen.rpartition("a [b].mp4")[2]
    assert "films" in last
    assert "1 of 3" in last
    assert "c.mp4: seconds" in last


def test_items_are_counted_as_they_pass():
    reported = []
    items = track("abc", lambda *now: reported.append(now), "letters", total=3)
    assert next(items) == "a"
    assert reported == [("letters", 0, 3)]
    assert list(items) == ["b", "c"]
    assert reported[1:] == [("letters", done, 3) for done in (1, 2, 3)]
