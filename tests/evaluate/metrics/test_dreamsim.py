"""DreamSim through its package, for which a stand-in stands here: the real one needs weights."""

import sys
import types

import numpy as np
import pytest

from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.metrics.dreamsim import NEEDED, DreamSim

torch = pytest.importorskip("torch")


class StandIn:
    """The package's interface, with mean colours for features: 1 - cosine of two frames'."""

    def __init__(self):
        self.calls: list[dict] = []
        self.batches: list[int] = []

    def dreamsim(self, **keywords):
        self.calls.append(keywords)
        return self.model, self.preprocess

    def preprocess(self, picture) -> torch.Tensor:
        assert picture.mode == "RGB"
        small = np.asarray(picture.resize((224, 224)), np.float32) / 255
        return torch.from_numpy(small).permute(2, 0, 1)[None]

    def model(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        assert a.shape == b.shape == (len(a), 3, 224, 224)
        assert float(a.max()) <= 1
        self.batches.append(len(a))
        x, y = a.mean((2, 3)), b.mean((2, 3))
        return 1 - torch.nn.functional.cosine_similarity(x, y, dim=-1)


@pytest.fixture
def package(monkeypatch) -> StandIn:
    found = StandIn()
    module = types.ModuleType("dreamsim")
    module.dreamsim = found.dreamsim
    module.__spec__ = types.SimpleNamespace(name="dreamsim")
    monkeypatch.setitem(sys.modules, "dreamsim", module)
    return found


@pytest.fixture
def cache(tmp_path):
    for name in NEEDED:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def test_each_clip_has_the_mean_of_its_frames(package, cache):
    clips, others = np.random.default_rng(0).integers(0, 256, (2, 2, 3, 5, 8, 8, 3)).astype("u1")
    others[1, 2] = clips[1, 2]
    found = DreamSim(cache, batch_size=4).similarity(clips, others)
    assert package.calls == [{"pretrained": True, "cache_dir": str(cache), "device": "cpu"}]
    assert package.batches == [4] * 7 + [2]
    assert found.shape == (2, 3)
    assert found[1, 2] == pytest.approx(1, abs=1e-6)
    x, y = (part[0, 1].mean((1, 2)) for part in (clips, others))
    cosines = (x * y).sum(-1) / np.linalg.norm(x, axis=-1) / np.linalg.norm(y, axis=-1)
    assert found[0, 1] == pytest.approx(cosines.mean(), abs=1e-3)  # the resize rounds


def test_nothing_is_begun_that_would_download(package, cache):
    (cache / "ensemble_lora").unlink()
    with pytest.raises(UserError, match="ensemble_lora missing: call dreamsim"):
        DreamSim(cache)
    assert package.calls == []


def test_without_the_package_it_says_what_to_install(cache, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"not installed: pip install dreamsim==0\.2\.1"):
        DreamSim(cache)


def test_a_package_that_does_not_import_says_why(cache, monkeypatch, tmp_path):
    (tmp_path / "dreamsim.py").write_text("raise RuntimeError('operator nms does not exist\\nx')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "dreamsim", raising=False)
    with pytest.raises(UserError, match=r"cannot be imported \(operator nms does not exist\)"):
        DreamSim(cache)
