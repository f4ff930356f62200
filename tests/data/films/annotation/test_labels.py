"""Annotations on disk, and manual ones: what is accepted, and which line an error names."""

import csv
import json
import re
from pathlib import Path

import pytest
from annotated_shots import (
    CHARACTERS,
    Take,
    annotate,
    annotations_of,
    film_name,
    label,
    lines_of,
    make_shots,
    says_of,
    write_characters,
)

from animegamer_jax.data.characters import Character, Characters, read_characters
from animegamer_jax.data.films.annotation.labels import (
    FIELDS,
    Annotation,
    FilmAnnotation,
    read_labels,
    read_report,
    read_saved_characters,
    read_unannotated,
    save_characters,
    validated,
    write_labels,
)
from animegamer_jax.data.films.annotation.manual import COLUMNS, add_manual_annotations
from animegamer_jax.errors import UserError

FIRST, SECOND = film_name(0), film_name(1)


@pytest.fixture
def shots(tmp_path):
    takes = [Take(), Take(dropped="black"), Take(), Take()]
    return make_shots(tmp_path / "shots", [takes, [Take(), Take()]])


def row(film: str, clip: int, **changes: object) -> dict[str, object]:
    return {"film": film, "clip": clip, **says_of(clip), **changes}


def write_table(path, rows, *, delimiter: str = ",") -> None:
    lines = [delimiter.join(rows[0])]
    lines += [delimiter.join(map(str, fields.values())) for fields in rows]
    path.write_text("\ufeff" + "\r\n".join([*lines, "", ""]))


def write_lines(path, rows) -> None:
    path.write_text("".join(json.dumps(fields) + "\n" for fields in rows))


# The record


def test_texts_of_a_record_are_cleaned():
    said = Annotation.model_validate(
        says_of(
            0, motion=" Riding\n a bicycle. ", adverb="Slowly", time="DAY", environment="Old Town"
        )
    )
    found = (said.motion, said.adverb, said.time, said.environment)
    assert found == ("riding a bicycle", "slowly", "day", "old town")


def test_labels_come_back(shots):
    labels = [label(3), label(0, source="manual")]
    annotate(shots, 0, labels, aside=[2])
    assert read_labels(shots, FIRST) == {0: labels[1], 3: labels[0]}
    assert [one["clip"] for one in annotations_of(shots, FIRST)] == [0, 3]
    assert [one.clip for one in read_unannotated(shots, FIRST)] == [2]
    assert read_saved_characters(shots) == CHARACTERS
    assert (read_report(shots, SECOND), read_labels(shots, SECOND)) == (None, {})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"motion_level": 7}, "line 2: motion_level: Input should be 1, 2, 3, 4 or 5, found 7"),
        ({"clip": 0}, "line 2: clip 0 appears twice"),
        ({"source": "a cat"}, "line 2: source: expected 'model' or 'manual', found"),
        ({"more": 1}, "line 2: more: Extra inputs"),
        ({"clip": None}, "line 2: expected an object with the number of its `clip`"),
    ],
)
def test_damaged_annotations_are_refused(shots, line, message):
    annotate(shots, 0, [label(0), label(2)])
    file = shots.folder(FIRST) / "annotations.jsonl"
    first, second = lines_of(file)
    write_lines(file, [first, second | line])
    with pytest.raises(UserError, match=message):
        read_labels(shots, FIRST)


def test_only_a_finished_film_has_annotations(shots):
    (shots.folder(FIRST) / "film.json").unlink()
    report = FilmAnnotation(film=FIRST, characters="", clips="")
    with pytest.raises(UserError, match="not a finished film"):
        write_labels(shots, report, [label(0)], unannotated=())
    assert not (shots.folder(FIRST) / "annotations.jsonl").exists()


def test_characters_are_saved_without_their_pictures(tmp_path, shots):
    characters = read_characters(write_characters(tmp_path))
    save_characters(shots, characters)
    saved = read_saved_characters(shots)
    assert (saved.entries, saved.digest, saved.pictures) == (
        characters.entries,
        characters.digest,
        {},
    )
    file = shots.path / "characters.json"
    for text in ("{", "[]", '{"layout": 2}', '{"layout": 2, "characters": []}'):
        file.write_text(text)
        with pytest.raises(UserError, match=r"characters\.json: "):
            read_saved_characters(shots)
        save_characters(shots, characters)
        assert read_saved_characters(shots) == characters


# Manual annotations


@pytest.mark.parametrize("form", [".csv", ".tsv", ".jsonl", ";"])
def test_manual_annotations_name_films_by_id_and_by_name(tmp_path, shots, form):
    rows = [row(FIRST, 3, subject="mika the cat"), row("Film 0.mp4", 0), row("Film 1.mp4", 1)]
    path = tmp_path / f"manual{'.csv' if form == ';' else form}"
    if form == ".jsonl":
        write_lines(path, rows)
    else:
        write_table(path, rows, delimiter={".csv": ",", ".tsv": "\t", ";": ";"}[form])
    assert add_manual_annotations(shots, path, CHARACTERS) == {FIRST: 2, SECOND: 1}
    found = annotations_of(shots, FIRST)
    assert [(one["clip"], one["source"], one["subject"]) for one in found] == [
        (0, "manual", "Mika"), (3, "manual", "Mika")
    ]  # fmt: skip
    assert annotations_of(shots, SECOND) == [{"clip": 1, **says_of(1), "source": "manual"}]
    report = read_report(shots, FIRST)
    assert (report.model, report.num_model, report.num_manual) == (None, 0, 2)
    assert read_saved_characters(shots) == CHARACTERS


def test_manual_annotations_replace_a_models(tmp_path, shots):
    annotate(shots, 0, [label(0), label(2)], aside=[3])
    write_lines(tmp_path / "manual.jsonl", [row(FIRST, 2, motion="sleeping"), row(FIRST, 3)])
    add_manual_annotations(shots, tmp_path / "manual.jsonl", CHARACTERS)
    labels = read_labels(shots, FIRST)
    assert [(one.clip, one.source) for one in labels.values()] == [
        (0, "model"), (2, "manual"), (3, "manual")
    ]  # fmt: skip
    assert labels[2].annotation.motion == "sleeping"
    assert read_unannotated(shots, FIRST) == []
    report = read_report(shots, FIRST)
    assert (report.model, report.num_model, report.num_manual) == ("a test", 1, 2)
    write_lines(tmp_path / "more.jsonl", [row(FIRST, 0)])
    add_manual_annotations(shots, tmp_path / "more.jsonl", CHARACTERS)
    assert {one.source for one in read_labels(shots, FIRST).values()} == {"manual"}


def test_a_models_annotations_for_other_characters_go(tmp_path, shots):
    annotate(shots, 0, [label(0), label(2, source="manual"), label(3, source="manual")])
    other = Characters((Character(name="Mika", aliases=(), images=("c" * 64,)),))
    write_lines(tmp_path / "manual.jsonl", [row(SECOND, 0)])
    add_manual_annotations(shots, tmp_path / "manual.jsonl", other)
    assert len(read_labels(shots, FIRST)) == 3  # not in the file: as it was
    write_lines(tmp_path / "manual.jsonl", [row(FIRST, 2, motion="sleeping")])
    add_manual_annotations(shots, tmp_path / "manual.jsonl", other)
    (kept,) = read_labels(shots, FIRST).values()  # 3 is Ren's, who is not of this characters
    assert kept.annotation.motion == "sleeping"


GOOD = row(FIRST, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"film": "Film 7.mp4"}, "line 3: film: expected the id or the file's name of a film in"),
        ({"film": "../../x"}, r"line 3: film: expected .*, found '\.\./\.\./x'"),
        ({"clip": 4}, "line 3: clip: expected a number from 0 to 3, found 4"),
        ({"clip": -1}, "line 3: clip: expected a number from 0 to 3, found -1"),
        ({"clip": "two"}, "line 3: clip: expected a number from 0 to 3, found 'two'"),
        ({"clip": 1}, r"line 3: clip 1 was dropped \(black\): remove the line"),
        ({"clip": 0}, r"line 3: clip 0: expected once, is also at .*, line 2"),
        ({"subject": "Yuki"}, "line 3: subject: expected one of: Mika, Ren, other, none; found"),
        ({"motion_level": 6}, "line 3: motion_level: Input should be 1, 2, 3, 4 or 5, found 6"),
        ({"stamina": 0}, "line 3: stamina: Input should be -1 or 1, found 0"),
        ({"social": "yes"}, "line 3: social: Input should be 0 or 1, found 'yes'"),
        ({"motion": "run; jump"}, "line 3: motion: expected letters"),
        ({"time": ""}, "line 3: time: expected a word or more"),
    ],
)
@pytest.mark.parametrize("form", [".csv", ".jsonl"])
def test_a_wrong_line_is_named_and_nothing_is_written(tmp_path, shots, form, changes, message):
    rows, path = [row(FIRST, 0), GOOD | changes], tmp_path / f"manual{form}"
    if form == ".csv":
        write_table(path, rows)
    else:
        write_lines(path, [{}, *rows])
        path.write_text(path.read_text().replace("{}\n", "\n"))
    with pytest.raises(UserError, match=rf"manual\{form}, {message}") as caught:
        add_manual_annotations(shots, path, CHARACTERS)
    assert "\n" not in str(caught.value)
    assert read_saved_characters(shots) is None
    assert not (shots.folder(FIRST) / "annotations.jsonl").exists()


HEAD = ",".join(COLUMNS)
LINE = ",".join(map(str, GOOD.values()))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.csv", "", r"x\.csv, line 1: missing film, clip, subject, .*: expected the columns"),
        ("x.csv", HEAD, r"x\.csv: no annotations: expected a line for each clip"),
        ("x.csv", HEAD.replace("clip,", ""), "line 1: missing clip: expected the columns film"),
        ("x.csv", f"{HEAD},notes", "line 1: unexpected 'notes': expected the columns film, clip"),
        ("x.csv", f"{HEAD},clip", "line 1: unexpected 'clip': expected the columns .*, each once"),
        ("x.csv", f"{HEAD}\n{LINE},x", "line 2: unexpected '\\(extra cells\\)'"),
        ("x.csv", f'{HEAD}\n\n{LINE}\n"{"x" * 140_000}"', "line 4: not a table"),
        ("x.csv", f"{HEAD}\n{LINE.replace(',0,', ',' + '9' * 5000 + ',', 1)}", "line 2: "),
        ("x.csv", b"film\xff", "line 1: expected UTF-8 text"),
        ("x.csv", HEAD.encode() + b"\n\xff", "line 2: expected UTF-8 text"),
        ("x.jsonl", "", r"x\.jsonl: no annotations"),
        ("x.jsonl", "{", "line 1: not valid JSON"),
        ("x.jsonl", "[1]", r"line 1: expected a JSON object, found \[1\]"),
        ("x.jsonl", '{"film": "x"}', "line 1: missing clip, subject"),
        ("x.jsonl", json.dumps({**GOOD, "note": 1}), "line 1: unexpected 'note'"),
        ("x.txt", "", r"x\.txt: expected a name that ends in \.csv, \.tsv, \.jsonl, \.ndjson"),
    ],
)
def test_files_that_are_none(tmp_path, shots, name, content, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message) as caught:
        add_manual_annotations(shots, path, CHARACTERS)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    with pytest.raises(UserError, match="cannot be read: No such file"):
        add_manual_annotations(shots, tmp_path / "absent.csv", CHARACTERS)


def test_a_name_of_two_films(tmp_path, shots):
    for film in (FIRST, SECOND):
        file = shots.folder(film) / "film.json"
        file.write_text(file.read_text().replace("Film 1.mp4", "Film 0.mp4"))
    write_lines(tmp_path / "manual.jsonl", [row("Film 0.mp4", 0)])
    with pytest.raises(UserError, match=f"'Film 0.mp4' is the name of {FIRST} and {SECOND}: use"):
        add_manual_annotations(shots, tmp_path / "manual.jsonl", CHARACTERS)


def test_the_page_of_the_fields_has_them_all_and_its_sample_is_accepted():
    page = (Path(__file__).parents[4] / "docs" / "annotations.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(FIELDS)
    numbers = {"motion_level", "social", "entertainment", "stamina"}
    head, *lines = csv.reader(re.findall(r"```csv\n(.*?)```", page, re.DOTALL)[0].splitlines())
    assert sorted(head) == sorted(COLUMNS)
    samples = [dict(zip(head, line, strict=True)) for line in lines]
    samples.append(json.loads(re.findall(r"```json\n(.*?)```", page, re.DOTALL)[0]))
    assert len(samples) == 4
    for sample in samples:
        validated({n: int(sample[n]) if n in numbers else sample[n] for n in FIELDS}, CHARACTERS)
