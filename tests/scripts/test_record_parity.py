"""The recorder of the PyTorch release's numbers; with a checkout of the release, all of it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from animegamer_jax import cli

pytest.importorskip("torch", reason="the recorder needs PyTorch")
import record_parity  # it imports PyTorch

SCRIPT = Path(__file__).parents[2] / "scripts" / "record_parity.py"
RELEASE, PYTHON = "ANIMEGAMER_RELEASE", "ANIMEGAMER_RELEASE_PYTHON"


class Words:
    """A tokenizer that counts: every word and every special token is one."""

    bos_token_id = 1

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [len(piece) for piece in re.findall(r"<[^>]*>|[^<\s]+", text)]


def test_prompt_marks_queries_history_and_state():
    ids, query, history, state = record_parity.prompt(Words(), ["go left", "jump"], ended=True)
    past = 1 + 3 + 230 + 14  # the start; <TURN> and two words; the block and its marks; the state
    assert ids.shape == (1, past + 2 + 230 + 14)
    assert history[0].nonzero().flatten().tolist() == list(range(6, 6 + 226))
    assert query[0].nonzero().flatten().tolist() == list(range(past + 4, past + 4 + 226))
    assert state[0].nonzero().flatten().tolist() == list(range(past + 232, past + 246))


def test_prompt_of_a_turn_to_play_ends_where_its_state_begins():
    ids, query, history, state = record_parity.prompt(Words(), ["go left"])
    assert ids.shape == (1, 1 + 3 + 230 + 1)
    assert int(query.sum()) == 226
    assert not history.any()
    assert state[0].nonzero().flatten().tolist() == [234]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to record"),
        (["--agent", "pytorch_model.bin"], "--agent needs --mistral and --tokenizer"),
    ],
)
def test_what_is_missing_is_named(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.setattr(sys, "argv", ["record_parity.py", str(tmp_path), str(tmp_path), *words])
    with pytest.raises(SystemExit):
        record_parity.main()
    assert message in capsys.readouterr().err


def test_a_folder_that_is_no_clone_is_named(tmp_path):
    with pytest.raises(SystemExit, match="expected a clone of AnimeGamer"):
        record_parity.import_release(tmp_path)


@pytest.mark.slow
def test_what_the_release_records_is_matched(reference, tmp_path, capsys):
    if not (os.environ.get(RELEASE) and os.environ.get(PYTHON)):
        pytest.skip(f"{RELEASE} (a clone) and {PYTHON} (of its environment) are not set")
    folder = tmp_path / "recorded"
    mllm = reference / "mllm"
    subprocess.run(
        [
            os.environ[PYTHON], SCRIPT, os.environ[RELEASE], folder,
            "--vae", reference / "vae" / "3d-vae.pt", "--decoder", reference / "vdm",
            "--agent", mllm / "pytorch_model.bin", "--mistral", mllm / "Mistral-tiny",
            "--tokenizer", reference / "tokenizer",
        ],
        check=True,
    )  # fmt: skip
    rows = tmp_path / "rows.json"
    assert cli.main(["parity", str(folder), "--json", str(rows)]) == 0, capsys.readouterr().out
    names = [row["quantity"].split(":")[0] for row in json.loads(rows.read_text())]
    assert {name: names.count(name) for name in ("mllm", "dit", "vae")} == {
        "mllm": 83, "dit": 3, "vae": 3,
    }  # fmt: skip
