"""The report of an evaluation, opened in a real browser, and what is read back from its file."""

import dataclasses
import html
import json
import re
from typing import Any

import numpy as np
import pytest
from browser import open_browser, open_page
from markdown_it import MarkdownIt

from animegamer_jax.data.usage import Usage
from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.ablations import (
    AblationRow,
    Ablations,
    Score,
    read_ablations,
    write_ablations,
)
from animegamer_jax.evaluate.catalogue import METRICS
from animegamer_jax.evaluate.metrics import Estimate
from animegamer_jax.evaluate.plots import Line, line_plot
from animegamer_jax.evaluate.report import write_report
from animegamer_jax.evaluate.report_games import chosen_games, mean_ranks, ranked_by
from animegamer_jax.evaluate.report_tables import best_system, main_table, number
from animegamer_jax.evaluate.report_text import escape_markdown
from animegamer_jax.evaluate.results import (
    Evaluation,
    SystemResult,
    read_results,
    write_results,
)
from animegamer_jax.evaluate.verdict import CRITERIA, Agreement, Verdict
from animegamer_jax.game import Game

HTML = '<img src=x onerror="document.title=1">'
EVIL = f"{HTML} | `a` *b* [c](d) \u202e \U0001f98a \u05e9\u05dc\u05d5\u05dd"
GAMES, TURNS = 6, 4
PHONE = {"width": 390, "height": 800}
TOY = ("CLIP-I", "ACC-F", "MAE-F", "ACC-S", "MAE-S", "seconds", "ACC-L", "PSNR", "all three")
ENDS = {"CLIP-I": (0.55, 0.95), "MAE-F": (0, 3), "MAE-S": (0, 2), "seconds": (2, 3)}
ENDS |= {"PSNR": (15, 25)}


def write_game(folder, instructions, *, hue, states):
    """A small game: a square that goes across, in a colour of the system."""
    game = Game.create(folder, model="tiny", seed=1, window=3, steps=2, protocol="paper")
    for turn, instruction in enumerate(instructions):
        frames = np.full((17, 48, 72, 3), 235, np.uint8)
        frames[:, 30:] = (150, 190, 140)
        for frame in range(17):
            left = 3 * frame + turn
            frames[frame, 20:32, left : left + 12] = hue
        game.add(
            instruction,
            states=np.asarray(states[turn], np.int32),
            motion_value=2.0,
            representation=np.zeros((4, 8), np.float32),
            frames=frames,
            seconds={"total": 2.0},
        )


def values_of(names, random, *, games, turns, gain=0.0):
    """By chance, in each metric's range; `gain` of the range is added, a share of ones for ACC."""
    values = {}
    for name in names:
        low, high = ENDS.get(name, (0, 1))
        drawn = random.random((games, turns))
        if METRICS[name].unit.startswith("share"):
            values[name] = (drawn < 0.5 + gain).astype(np.float64)
        else:
            sign = 1 if METRICS[name].better == "higher" else -1
            values[name] = low + (high - low) * np.clip(0.2 + 0.6 * drawn + sign * gain, 0, 1)
    return values


def make_evaluation(folder, *, games=GAMES, turns=TURNS, names=TOY, clips=("a1" * 32,) * 2):
    """Two systems of which the second is better by far; one instruction would like to be HTML."""
    random = np.random.default_rng(0)
    told = [
        tuple(f"Ren is walking in the park, part {t} of {g}." for t in range(turns))
        for g in range(games)
    ]
    told[0] = (EVIL, *told[0][1:])
    expected = np.stack(
        [random.integers(1, 6, (games, turns))]
        + [random.integers(-1, 2, (games, turns)) for _ in range(3)],
        -1,
    )
    systems = []
    for which, (name, clip) in enumerate(zip(("toy", f"our model {EVIL}"), clips, strict=False)):
        values = values_of(names, random, games=games, turns=turns, gain=0.3 * which)
        if folder is not None:
            for game in range(games):
                states = expected[game].copy()
                states[::2, 1] *= -1
                place = folder / "games" / f"{which}" / f"game_{game:03d}"
                write_game(place, told[game], hue=(40, 90 + 90 * which, 200), states=states)
        systems.append(
            SystemResult(
                name=name,
                model="toy" if not which else "out/model",
                digest=f"{which}" * 64,
                settings={"protocol": "paper", "window": 5, "steps": 50, "clip": clip},
                values=values,
                folders=tuple(f"games/{which}/game_{game:03d}" for game in range(games)),
                set_scores={"FVD": 512.5 - 100 * which},
                beside={
                    "true clips": {"CLIP-I": Estimate(0.97, 0.96, 0.98, 24)},
                    "through the VAE": {"CLIP-I": Estimate(0.91, 0.9, 0.92, 24)},
                    "another game's clips": {
                        "CLIP-I": Estimate(0.61, 0.6, 0.62, 24),
                        "all three": Estimate(0.02, 0.0, 0.04, 24),
                    },
                },
                left_out={"dreamsim": f"no weights of DreamSim: {EVIL}"},
                notes=("Seconds are of two cores.",),
            )
        )
    is_open = np.zeros((games, turns), bool)
    is_open[:, 1::2] = True
    return Evaluation(
        benchmark="toy",
        benchmark_digest="0123456789abcdef" * 4,
        world="toy",
        made_by="the toy world's held-out games",
        games=tuple(f"test-{game}" for game in range(games)),
        instructions=tuple(told),
        is_open=is_open,
        expected=expected,
        systems=tuple(systems),
        about={"date": "2025-01-31", "command": "animegamer evaluate toy", "seeds": [0, 5]},
    )


def judged(evaluation, *, model="judge-1"):
    names = tuple(sorted(system.name for system in evaluation.systems))
    shape = len(evaluation.games), len(names), len(CRITERIA)
    scores = np.random.default_rng(1).integers(4, 10, shape).astype(np.float64)
    scores[1] = np.nan
    return Verdict(
        model=model,
        seed=0,
        games=evaluation.games,
        systems=names,
        scores=scores,
        set_aside={evaluation.games[1]: f"no answer in time {EVIL}"},
        usage=Usage(requests=7, answered=5, prompt_tokens=9000, completion_tokens=400, cost=0.02),
    )


def with_judges(evaluation):
    return dataclasses.replace(
        evaluation,
        verdicts=(judged(evaluation), judged(evaluation, model=f"judge-2 {EVIL}")),
        agreements={
            "judge-1 and judge-2": Agreement(
                spearman=0.4, num_scores=10, preference=None, num_pairs=0, num_tied=5
            )
        },
    )


ABLATIONS = Ablations(
    made="Written by scripts/toy_ablations.py: 100 held-out games of 5 turns.",
    rows=(
        AblationRow(
            name="decoder alone",
            part="decoder",
            scores={"CLIP-I": Score(0.9, 0.88, 0.92), "ACC-F": Score(0.8, 0.7, 0.9)},
            paper={"CLIP-I": 0.8672, "ACC-F": 0.729},
        ),
        AblationRow(name="no motion input", part="decoder", scores={"ACC-F": Score(0.2, 0.1, 0.3)}),
        AblationRow(
            name="whole game", part="game", scores={"open turns: all three": Score(0.7, 0.6, 0.8)}
        ),
    ),
    signs=("- no motion input: ACC-F -0.600 (-0.547), as in the paper.",),
)


@pytest.fixture(scope="module")
def browser():
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An evaluation's folder with its report."""
    folder = tmp_path_factory.mktemp("evaluation")
    write_results(folder, with_judges(make_evaluation(folder)))
    write_ablations(folder / "ablations.json", ABLATIONS)
    write_report(folder, read_results(folder), ablations=folder / "ablations.json")
    return folder


def cells(page, title):
    """A table's rows by the name in their head: texts without what only looks."""
    table = page.locator("table", has=page.locator("caption", has_text=title)).first
    rows: dict[str, list[str]] = {}
    for row in table.locator("tr").all():
        head, *others = [" ".join(t.split()) for t in row.locator("th, td").all_inner_texts()]
        rows[head] = others
    return rows


def test_the_page_in_a_browser(browser, folder):
    with open_page(browser, (folder / "report.html").as_uri()) as (page, wrong):
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.reload()
        assert [url[:5] for url in asked if not url.startswith("data:")] == ["file:"]
        assert EVIL.split()[0] in page.title()
        assert page.locator("main img[src='x']").count() == 0
        scores = cells(page, "All turns")
        columns = scores["metric"]
        assert columns[0] == "toy"
        assert columns[2:] == ["AnimeGamer, in the paper", "best baseline there"]
        names = [head.split()[0] for head in scores if head != "metric"]
        assert names == ["CLIP-I", "ACC-F", "MAE-F", "ACC-S", "MAE-S", "seconds", "ACC-L", "PSNR",
                         "all"]  # fmt: skip
        (row,) = [row for head, row in scores.items() if head.startswith("CLIP-I")]
        assert row[2:] == ["0.8132", "0.7960"]
        assert "★" in row[1]
        assert re.fullmatch(r"0\.\d{3} 0\.\d{3} to 0\.\d{3}", row[0])
        (row,) = [row for head, row in scores.items() if head.startswith("PSNR")]
        assert row[2:] == ["\u2013", "\u2013"]
        assert any("lower is better" in head for head in scores if head.startswith("MAE-S"))
        opened = cells(page, "Open turns")
        assert list(opened)[1].startswith("context accuracy (all three)")
        beside = cells(page, "toy")
        assert "another game's clips" in page.inner_text("#beside ~ .scroll")
        assert beside
        assert cells(page, "All clips together")["FVD"] == ["512.5", "412.5"]
        told = page.inner_text("body")
        for text in (
            EVIL.split("|")[0].strip(), "12 of 24 turns are open", "5 of 6 games judged",
            "cost 0.02", "only the direction may be compared", "animegamer evaluate toy",
            "Seconds are of two cores.", "0123456789abcdef", "paper: 0.8672",
        ):  # fmt: skip
            assert text in told
        assert "rank correlation" in told
        assert page.locator("figure").count() == len(TOY)
        for picture in page.locator("img").all():
            assert picture.evaluate("image => image.complete && image.naturalWidth > 0")
            alt = picture.get_attribute("alt")
            assert alt or picture.evaluate("image => image.closest('.legend') !== null")
        assert page.locator("details:has(ol)").count() == 6  # two systems, three games each
        assert page.locator("ol.turns > li").count() == 6 * TURNS
        assert page.locator(".wrong").count() > 0
        assert wrong == []


def test_it_reads_without_eyes_or_mouse(browser, folder):
    with open_page(browser, (folder / "report.html").as_uri()) as (page, wrong):
        heads = page.locator("th")
        assert heads.count() == page.locator("th[scope='col'], th[scope='row']").count() > 0
        assert page.locator("table").count() == page.locator("[role='region'] > table").count()
        ids = page.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
        assert len(ids) == len(set(ids))
        links = page.locator("nav a")
        for link in links.all():
            assert page.locator(link.get_attribute("href")).count() == 1
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.tagName") == "A"
        assert wrong == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(browser, folder, scheme):
    address = (folder / "report.html").as_uri()
    with open_page(browser, address, viewport=PHONE, color_scheme=scheme) as (page, wrong):
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        style = "getComputedStyle(document.body)"
        assert page.evaluate(f"{style}.color") != page.evaluate(f"{style}.backgroundColor")
        assert wrong == []


def test_the_markdown(folder):
    text = (folder / "report.md").read_text()
    page = MarkdownIt("commonmark", {"html": True}).enable("table").render(text)
    names = re.findall(r'<img [^>]*?src="([^"]+)"', page)
    assert len(names) == len(set(names)) == 2 + len(TOY) + 6 * TURNS
    assert all((folder / name).is_file() for name in names)
    assert {path.name for path in (folder / "report").iterdir()} == {n[7:] for n in names}
    assert len(re.findall("<(img|a|script|iframe)", page)) == len(names)  # nothing of EVIL
    assert html.unescape(page).count(f"{HTML} | `a` *b* [c](d)") == text.count("&lt;img src=x")
    for table in page.split("<table>")[1:]:
        rows = table.partition("</table>")[0].split("</tr>")[:-1]
        assert len({len(re.findall("</t[hd]>", row)) for row in rows}) == 1
    shown = re.sub("<[^>]*>", " ", html.unescape(page))
    assert not re.search(r"\*\*|\|---|^#", shown, re.MULTILINE)
    assert "| 0.8132 | 0.7960 |" in text
    assert "\n\n\n" not in text
    assert "- no motion input: ACC-F" in text


def test_drawn_again_from_its_file(folder, tmp_path):
    first = (folder / "report.html").read_bytes(), (folder / "report.md").read_bytes()
    (folder / "report" / "turns_99.svg").write_text("of an earlier report")
    (folder / "report" / "mine.txt").write_text("of somebody else")
    write_report(folder, read_results(folder), ablations=folder / "ablations.json")
    assert ((folder / "report.html").read_bytes(), (folder / "report.md").read_bytes()) == first
    assert not (folder / "report" / "turns_99.svg").exists()
    (folder / "report" / "mine.txt").unlink()


def test_clips_that_differ(tmp_path):
    evaluation = make_evaluation(None, clips=("a1" * 32, "b2" * 32))
    table = main_table(evaluation)
    rows = {row.name: row for row in table.rows}
    assert [cell.is_best for cell in rows["CLIP-I"].cells] == [False] * 4
    assert rows["CLIP-I"].cells[1].remark == "CLIP b2b2b2b2b2b2…: another scale"
    assert best_system(evaluation, "CLIP-I") is None
    assert best_system(evaluation, "PSNR") == evaluation.systems[1].name
    _, markdown = write_report(tmp_path, evaluation)
    assert "CLIP-I: the systems were not measured with the same network" in markdown.read_text()


def test_no_system_is_marked_for_less_than_chance():
    evaluation = make_evaluation(None)
    one = evaluation.systems[0]
    other = dataclasses.replace(one, name="the same")
    same = dataclasses.replace(evaluation, systems=(one, other))
    assert all(best_system(same, name) is None for name in TOY)
    shuffled = {name: values[::-1] for name, values in one.values.items()}
    even = dataclasses.replace(
        evaluation, systems=(one, dataclasses.replace(other, values=shuffled))
    )
    assert all(best_system(even, name) is None for name in TOY)
    first = {name: values[:1] for name, values in evaluation.systems[0].values.items()}
    second = {name: values[:1] for name, values in evaluation.systems[1].values.items()}
    single = dataclasses.replace(
        evaluation,
        games=evaluation.games[:1],
        systems=(
            dataclasses.replace(one, values=first),
            dataclasses.replace(other, values=second),
        ),
    )
    assert all(best_system(single, name) is None for name in TOY)


def emptied(evaluation, **changes: Any):
    """The evaluation with its last system as `changes` say."""
    *others, last = evaluation.systems
    return dataclasses.replace(evaluation, systems=(*others, dataclasses.replace(last, **changes)))


def test_a_system_with_everything_left_out(browser, tmp_path):
    evaluation = emptied(
        make_evaluation(tmp_path),
        values={},
        folders=(),
        set_scores={},
        beside={},
        left_out={"everything": "its games could not be read"},
    )
    page_file, markdown = write_report(tmp_path, evaluation)
    with open_page(browser, page_file.as_uri()) as (page, wrong):
        (row,) = [row for head, row in cells(page, "All turns").items() if "ACC-F" in head]
        assert row[1:] == ["\u2013", "0.6744", "0.4249"]
        assert "its games could not be read" in page.inner_text("body")
        assert "No games are kept." in page.inner_text("body")
        assert wrong == []
    assert "its games could not be read" in markdown.read_text()
    nothing = dataclasses.replace(
        evaluation, systems=evaluation.systems[1:], judge_note="no endpoint was given"
    )
    page_file, markdown = write_report(tmp_path, nothing)
    assert "No system has a value of any metric." in markdown.read_text()
    assert "no endpoint was given" in markdown.read_text()
    assert "No system has a value of any metric." in page_file.read_text()


def test_values_that_are_missing(tmp_path):
    evaluation = make_evaluation(None)
    values = {name: array.copy() for name, array in evaluation.systems[1].values.items()}
    values["CLIP-I"][:, 2] = np.nan
    values["CLIP-I"][3] = np.nan
    values["PSNR"][:] = np.nan
    evaluation = emptied(evaluation, values=values)
    rows = {row.name: row for row in main_table(evaluation).rows}
    assert rows["CLIP-I"].cells[1].remark == "of 15 turns"
    assert rows["PSNR"].cells[1].text == "\u2013"
    _, markdown = write_report(tmp_path, evaluation)
    text = markdown.read_text()
    assert "nan" not in text.lower().replace("finance", "")
    assert "cannot be shown: " in text  # no games were written


def test_a_long_game(browser, tmp_path):
    names = ("ACC-F", "ACC-S", "CLIP-I", "all three")
    evaluation = make_evaluation(None, games=1, turns=100, names=names)
    evaluation = dataclasses.replace(evaluation, systems=evaluation.systems[:1])
    place = tmp_path / evaluation.systems[0].folders[0]
    states = evaluation.expected[0]
    write_game(place, evaluation.instructions[0], hue=(200, 60, 40), states=states)
    page_file, markdown = write_report(tmp_path, evaluation)
    with open_page(browser, page_file.as_uri(), viewport=PHONE) as (page, wrong):
        assert page.locator("ol.turns > li").count() == 20
        told = page.inner_text("body")
        for text in ("the mean of the 9 turns around it", "There is one game only",
                     "20 of 100 turns, evenly spread"):  # fmt: skip
            assert text in told
        assert "★" not in told
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert wrong == []
    assert "![CLIP-I by turn." in markdown.read_text()


def test_a_running_mean():
    values = np.arange(40.0)[None]
    line = Line(0, values)
    found = [found.mean for found in line.estimates if found]
    assert found[0] == pytest.approx(2.0)  # of turns 1 to 5
    assert found[20] == pytest.approx(20.0)
    assert line.means[0] == 0.0
    short = Line(0, values[:, :30])
    assert [found.mean for found in short.estimates if found] == list(range(30))
    values[0, 3] = np.nan
    assert np.isnan(Line(0, values).means[3])


def test_a_plot_is_the_same_every_time():
    random = np.random.default_rng(0)
    lines = [Line(number, random.random((3, 5))) for number in range(7)]
    svg = line_plot(lines)
    assert svg == line_plot(lines)
    assert svg.startswith("<svg")
    assert "prefers-color-scheme" in svg
    assert "http" not in re.sub(r'xmlns(:xlink)?="[^"]*"', "", svg)
    for turns in (1, 2):
        assert "<svg" in line_plot([Line(0, random.random((3, turns)))])


def test_which_games_are_shown():
    values = {
        "all three": np.array([[1.0, 1], [0, 0], [1, 0], [1, 0]]),
        "ACC-F": np.array([[1.0, 1], [0, 1], [np.nan, np.nan], [0, 1]]),
        "MAE-F": np.array([[9.0, 9], [0, 0], [0, 0], [0, 0]]),
    }
    system = SystemResult(
        name="a", model="a", digest=None, settings={}, values=values, folders=("",) * 4
    )
    assert ranked_by(system) == ["all three", "ACC-F"]
    assert mean_ranks(system).tolist() == [1.0, 3.25, 2.5, 2.5]
    assert chosen_games(mean_ranks(system)) == {"best": 0, "median": 2, "worst": 1}
    other = dataclasses.replace(system, values={"MAE-F": values["MAE-F"]})
    assert mean_ranks(other).tolist() == [4.0, 2.0, 2.0, 2.0]
    none = dataclasses.replace(system, values={})
    assert chosen_games(mean_ranks(none)) == {"first": 0}
    assert chosen_games(np.array([2.0, 1.0])) == {"best": 1, "worst": 0}
    assert chosen_games(np.array([np.nan, 1.0])) == {"best": 1}


def test_texts_in_markdown():
    assert escape_markdown("a|b *c* <d> & \n [e](f)") == (r"a\|b \*c\* &lt;d&gt; &amp; \[e\](f)")
    assert escape_markdown("1. one") == r"1\. one"
    assert escape_markdown("0.123") == "0.123"
    assert escape_markdown("# one") == r"\# one"
    assert escape_markdown("\u05e9") == "\u2068\u05e9\u2069"
    assert number(-0.25) == "\u22120.250"
    assert number(1234.5) == "1,234"
    assert number(float("nan")) == "\u2013"


def test_results_come_back(tmp_path):
    evaluation = with_judges(make_evaluation(None))
    values = dict(evaluation.systems[1].values)
    values["CLIP-I"] = values["CLIP-I"].astype(np.float32)
    values["CLIP-I"][2, 1] = np.nan
    evaluation = emptied(
        evaluation,
        values=values,
        digest=None,
        set_scores={"FVD": float("nan")},
        settings={"steps": np.int64(50), "scale": np.float32(0.5), "list": [1, {"a": None}]},
    )
    evaluation = dataclasses.replace(evaluation, judge_note="a note", about={"t": (1, 2)})
    write_results(tmp_path, evaluation)
    again = read_results(tmp_path)
    for system, other in zip(evaluation.systems, again.systems, strict=True):
        for name, array in system.values.items():
            np.testing.assert_allclose(other.values[name], array, rtol=0, atol=1e-6)
        for name in ("name", "model", "digest", "folders", "beside", "left_out", "notes"):
            assert getattr(other, name) == getattr(system, name)
    assert np.isnan(again.systems[1].set_scores["FVD"])
    assert again.systems[1].settings == {"steps": 50, "scale": 0.5, "list": [1, {"a": None}]}
    assert again.about == {"t": [1, 2]}
    for verdict, other in zip(evaluation.verdicts, again.verdicts, strict=True):
        np.testing.assert_equal(other.scores, verdict.scores)
        assert (other.usage, other.set_aside) == (verdict.usage, verdict.set_aside)
    assert again.agreements == evaluation.agreements
    np.testing.assert_equal(again.is_open, evaluation.is_open)
    np.testing.assert_equal(again.expected, evaluation.expected)
    for name in ("benchmark", "games", "instructions", "judge_note"):
        assert getattr(again, name) == getattr(evaluation, name)
    text = (tmp_path / "results.json").read_text()
    write_results(tmp_path, again)
    assert (tmp_path / "results.json").read_text() == text


def test_results_of_no_games_come_back(tmp_path):
    evaluation = make_evaluation(None)
    none = Verdict(
        model="j", seed=0, games=(), systems=("a",), scores=np.zeros((0, 1, len(CRITERIA))),
        set_aside={}, usage=Usage(),
    )  # fmt: skip
    write_results(tmp_path, dataclasses.replace(evaluation, verdicts=(none,), expected=None))
    again = read_results(tmp_path)
    assert again.verdicts[0].scores.shape == (0, 1, len(CRITERIA))
    assert again.expected is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 2}, "format_version: expected 1, found 2: read it with the version"),
        ({"world": None}, "world: expected a value of type str, found null"),
        ({"colour": 1}, "unknown field 'colour'"),
        ({"is_open": [[True], [False, True]]}, r"is_open: expected lists of bool in 2 dimensions"),
        ({"is_open": [[1, 0]]}, "is_open: expected lists of bool"),
        ({"games": ["a"]}, "instructions: expected 4 of each of 1 games"),
        ({"systems": {}}, "systems: expected a list"),
        ({"expected": [[[1, 2, 3, 4]]]}, r"expected: expected the shape \(6, 4, 4\)"),
    ],
)
def test_results_that_are_damaged(tmp_path, change, message):
    write_results(tmp_path, make_evaluation(None))
    path = tmp_path / "results.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError, match=message) as told:
        read_results(tmp_path)
    assert str(told.value).startswith(str(path))
    assert "\n" not in str(told.value)


def test_results_that_are_none(tmp_path):
    with pytest.raises(UserError, match=r"results\.json: cannot be read: No such file"):
        read_results(tmp_path)
    for text in ("{", '{"a": NaN}', "[]", "\xff"):
        (tmp_path / "results.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(UserError, match=r"results\.json: "):
            read_results(tmp_path)


def test_ablations_come_back(tmp_path):
    path = tmp_path / "ablations.json"
    write_ablations(path, ABLATIONS)
    assert read_ablations(path) == ABLATIONS
    path.write_text(path.read_text().replace('"decoder"', '"nothing"'))
    with pytest.raises(UserError, match=r"rows\[0\]\.part: expected one of 'decoder', 'game'"):
        read_ablations(path)
    path.write_text("{")
    with pytest.raises(UserError, match="no JSON"):
        read_ablations(path)
    with pytest.raises(UserError, match="cannot be read"):
        read_ablations(tmp_path / "nothing.json")


def test_a_disk_that_refuses(tmp_path):
    (tmp_path / "report").write_text("a file")
    with pytest.raises(UserError, match="the report cannot be written: File exists"):
        write_report(tmp_path, make_evaluation(None))
