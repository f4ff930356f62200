"""An evaluation of two systems by chance, with small games on the disk where a folder is given."""

import dataclasses
from typing import Any

import numpy as np

from animegamer_jax.evaluate.judge.scores import (
    CRITERIA,
    Agreement,
    JudgeScores,
)
from animegamer_jax.evaluate.metrics.registry import METRICS
from animegamer_jax.evaluate.report.ablations import (
    AblationRow,
    Ablations,
    Score,
)
from animegamer_jax.evaluate.results import Evaluation, SystemResult
from animegamer_jax.game.saved.turns import NewTurn
from animegamer_jax.game.saved_game import Game
from animegamer_jax.vlm.usage import Usage

HTML = '<img src=x onerror="document.title=1">'
EVIL = f"{HTML} | `a` *b* [c](d) \u202e \U0001f98a \u05e9\u05dc\u05d5\u05dd"
GAMES, TURNS = 6, 4
TOY = ("CLIP-I", "ACC-F", "MAE-F", "ACC-S", "MAE-S", "seconds", "ACC-L", "PSNR", "all three")
ENDS = {"CLIP-I": (0.55, 0.95), "MAE-F": (0, 3), "MAE-S": (0, 2), "seconds": (2, 3)}
ENDS |= {"PSNR": (15, 25)}


def write_game(folder, instructions, *, hue, states, num_frames=17):
    """A small game: a square that goes across, in a colour of the system."""
    game = Game.create(folder, model="tiny", seed=1, window=3, steps=2, protocol="paper")
    for turn, instruction in enumerate(instructions):
        frames = np.full((num_frames, 48, 72, 3), 235, np.uint8)
        frames[:, 30:] = (150, 190, 140)
        for frame in range(num_frames):
            left = 3 * frame + turn % 10
            frames[frame, 20:32, left : left + 12] = hue
        played = NewTurn(
            states=np.asarray(states[turn], np.int32),
            motion_value=2.0,
            representation=np.zeros((4, 8), np.float32),
            frames=frames,
            seconds={"total": 2.0},
        )
        game.add(played, instruction)


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
    asked = [
        tuple(f"Ren is walking in the park, part {t} of {g}." for t in range(turns))
        for g in range(games)
    ]
    asked[:1] = [(EVIL, *of_first[1:]) for of_first in asked[:1]]
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
                write_game(place, asked[game], hue=(40, 90 + 90 * which, 200), states=states)
        systems.append(
            SystemResult(
                name=name,
                model="toy" if not which else "out/model",
                digest=f"{which}" * 64,
                settings={"protocol": "paper", "window": 5, "steps": 50, "clip": clip},
                values=values,
                folders=tuple(f"games/{which}/game_{game:03d}" for game in range(games)),
                set_scores={"FVD": 512.5 - 100 * which},
                reference={
                    "true clips": {"CLIP-I": np.full((games, turns), 0.97)},
                    "another game's clips": {
                        "CLIP-I": np.full((games, turns), 0.61),
                        "all three": np.full((games, turns), 0.02),
                    },
                },
                skipped={"dreamsim": f"no weights of DreamSim: {EVIL}"},
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
        instructions=tuple(asked),
        motions=tuple(tuple("walk" if t % 2 else "talk" for t in range(turns)) for _ in asked),
        is_open=is_open,
        expected=expected,
        systems=tuple(systems),
        run_config={"date": "2025-01-31", "command": "animegamer evaluate toy", "seeds": [0, 5]},
    )


def judged(evaluation, *, model="judge-1"):
    names = tuple(sorted(system.name for system in evaluation.systems))
    shape = len(evaluation.games), len(names), len(CRITERIA)
    scores = np.random.default_rng(1).integers(4, 10, shape).astype(np.float64)
    scores[1] = np.nan
    return JudgeScores(
        model=model,
        seed=0,
        games=evaluation.games,
        systems=names,
        scores=scores,
        skipped={evaluation.games[1]: f"no answer in time {EVIL}"},
        usage=Usage(requests=7, answered=5, prompt_tokens=9000, completion_tokens=400, cost=0.02),
    )


def with_judges(evaluation):
    return dataclasses.replace(
        evaluation,
        judge_scores=(judged(evaluation), judged(evaluation, model=f"judge-2 {EVIL}")),
        agreements={
            "judge-1 and judge-2": Agreement(
                spearman=0.4, num_scores=10, preference=None, num_pairs=0, num_tied=5
            )
        },
    )


ABLATIONS = Ablations(
    made="Written by scripts/toy/ablations.py: 100 held-out games of 5 turns.",
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


def emptied(evaluation, **changes: Any):
    """The evaluation with its last system as `changes` say."""
    *others, last = evaluation.systems
    return dataclasses.replace(evaluation, systems=(*others, dataclasses.replace(last, **changes)))
