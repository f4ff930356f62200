"""The report of an evaluation, opened in a real browser."""

import dataclasses
import html
import re

import numpy as np
import pytest
from browser import open_browser, open_page
from markdown_it import MarkdownIt
from tiny_evaluation import (
    ABLATIONS,
    EVIL,
    HTML,
    TOY,
    TURNS,
    emptied,
    make_evaluation,
    with_judges,
    write_game,
)

from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.report.ablations import write_ablations
from animegamer_jax.evaluate.report.build import write_report
from animegamer_jax.evaluate.report.games import (
    chosen_games,
    mean_ranks,
    ranked_by,
)
from animegamer_jax.evaluate.report.plots import Line, line_plot
from animegamer_jax.evaluate.report.render import escape_markdown
from animegamer_jax.evaluate.report.summary import summarize
from animegamer_jax.evaluate.report.tables import (
    best_system,
    main_table,
    number,
)
from animegamer_jax.evaluate.results import SystemResult, read_results, write_results

PHONE = {"width": 390, "height": 800}


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
        assert "another game's clips" in page.inner_text("#reference ~ .scroll")
        references = cells(page, "toy: open turns")
        assert references["metric"][0] == "the system itself"
        (row,) = [row for head, row in references.items() if head.startswith("context accuracy")]
        assert row[2] == "0.020 0.020 to 0.020"
        levels = cells(page, "toy: by motion level")
        assert list(levels) == ["motion level", "1", "2", "3", "4", "5"]
        kinds = cells(page, "toy: by kind of motion")
        assert list(kinds) == ["kind of motion", "talk", "walk"]
        assert kinds["kind of motion"] == ["CLIP-I", "ACC-F", "MAE-F", "ACC-S", "MAE-S", "seconds",
                                           "ACC-L", "PSNR", "all three"]  # fmt: skip
        judges = cells(page, "Scores by judge-1")
        assert judges["criterion"] == columns[:2]
        assert cells(page, "All clips together")["FVD"] == ["512.5", "412.5"]
        body = page.inner_text("body")
        for text in (
            EVIL.split("|")[0].strip(), "12 of 24 turns are open", "5 of 6 games judged",
            "cost 0.02", "only the direction may be compared", "animegamer evaluate toy",
            "Seconds are of two cores.", "0123456789abcdef", "paper: 0.8672",
        ):  # fmt: skip
            assert text in body
        assert "rank correlation" in body
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
    text = markdown.read_text()
    assert "CLIP-I: computed with different networks (toy: a1a1" in text
    assert text.count("Computed with different networks: lines are not comparable.") == 1


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
            dataclasses.replace(one, values=first, reference={}),
            dataclasses.replace(other, values=second, reference={}),
        ),
    )
    assert all(best_system(single, name) is None for name in TOY)


def test_a_system_with_everything_skipped(browser, tmp_path):
    evaluation = emptied(
        make_evaluation(None),
        values={},
        folders=(),
        set_scores={},
        reference={},
        skipped={"everything": "its games could not be read"},
    )
    page_file, markdown = write_report(tmp_path, evaluation)
    with open_page(browser, page_file.as_uri()) as (page, wrong):
        (row,) = [row for head, row in cells(page, "All turns").items() if "ACC-F" in head]
        assert row[1:] == ["\u2013", "0.6744", "0.4249"]
        assert "its games could not be read" in page.inner_text("body")
        assert "No games were saved." in page.inner_text("body")
        assert wrong == []
    assert "its games could not be read" in markdown.read_text()
    nothing = dataclasses.replace(
        evaluation, systems=evaluation.systems[1:], judge_note="no endpoint was given"
    )
    page_file, markdown = write_report(tmp_path, nothing)
    assert "No system has a value of any metric." in markdown.read_text()
    assert "no endpoint was given" in markdown.read_text()
    assert "No system has a value of any metric." in page_file.read_text()
    none = make_evaluation(None, games=0)
    page_file, _ = write_report(tmp_path, none)
    assert "0 games of 4 turns" in page_file.read_text()


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
    write_game(place, evaluation.instructions[0], hue=(200, 60, 40), states=states, num_frames=2)
    page_file, markdown = write_report(tmp_path, evaluation)
    with open_page(browser, page_file.as_uri(), viewport=PHONE) as (page, wrong):
        assert page.locator("ol.turns > li").count() == 20
        body = page.inner_text("body")
        for text in ("the mean of the 9 turns around it", "There is only one game",
                     "20 of 100 turns, evenly spread"):  # fmt: skip
            assert text in body
        assert "★" not in body
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


def test_a_disk_that_refuses(tmp_path):
    (tmp_path / "report").write_text("a file")
    with pytest.raises(UserError, match="the report cannot be written: File exists"):
        write_report(tmp_path, make_evaluation(None))


def test_the_terminal_says_that_the_papers_scores_are_not_comparable():
    lines = list(summarize(make_evaluation(None).systems))
    assert lines[0].endswith("paper")
    assert "paper: on its own films and benchmark, so not comparable" in lines
