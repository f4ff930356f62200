"""LPIPS against the same network put together in PyTorch, and what a distance must be."""

import jax
import numpy as np
import pytest

from animegamer_jax.errors import UserError
from animegamer_jax.evaluate.metrics import lpips
from animegamer_jax.evaluate.metrics.lpips import (
    LPIPS,
    load_lpips,
    lpips_distance,
)

torch = pytest.importorskip("torch")
nn = torch.nn

SIZE = 64, 96  # of smaller pictures XLA convolves 30 times as long, without its optimizations
WIDTHS = 64, 192, 384, 256, 256


class TorchAlexNet(nn.Module):
    """With torchvision's names; the classifier is there, and as narrow as names allow."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, 11, stride=4, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(64, 192, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(192, 384, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(384, 256, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(256, 256, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
        )
        self.classifier = nn.Sequential(nn.Dropout(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))


class TorchLinear(nn.Module):
    """With the names of `alex.pth`."""

    def __init__(self):
        super().__init__()
        for i, width in enumerate(WIDTHS):
            layer = nn.Module()
            layer.model = nn.Sequential(nn.Dropout(), nn.Conv2d(width, 1, 1, bias=False))
            setattr(self, f"lin{i}", layer)


def torch_distance(alexnet: TorchAlexNet, linear: TorchLinear, a, b) -> np.ndarray:
    """The same by PyTorch's layers, in float64."""
    mean, std = (
        torch.tensor(row, dtype=torch.float64)[None, :, None, None]
        for row in ([-0.030, -0.088, -0.188], [0.458, 0.448, 0.450])
    )
    alexnet, linear = alexnet.double().eval(), linear.double().eval()
    x, y = (
        (torch.from_numpy(frames).permute(0, 3, 1, 2).double() / 255 * 2 - 1 - mean) / std
        for frames in (a, b)
    )
    total, number = 0, 0
    for layer in alexnet.features[:-1]:  # the last pooling is not looked at
        x, y = layer(x), layer(y)
        if isinstance(layer, nn.ReLU):
            unit = [z / (z.pow(2).sum(1, keepdim=True).sqrt() + 1e-10) for z in (x, y)]
            weighted = getattr(linear, f"lin{number}").model((unit[0] - unit[1]) ** 2)
            total = total + weighted.mean((1, 2, 3))
            number += 1
    assert number == 5
    return total.detach().numpy()


@pytest.fixture(scope="module")
def networks() -> tuple[TorchAlexNet, TorchLinear]:
    torch.manual_seed(0)
    alexnet, linear = TorchAlexNet(), TorchLinear()
    for name, parameter in linear.named_parameters():
        assert name.endswith(".model.1.weight")
        parameter.data.uniform_(0, 1)  # published weights are not negative
    return alexnet, linear


@pytest.fixture(scope="module")
def files(networks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lpips")
    for network, name in zip(networks, ("alexnet.pth", "alex.pth"), strict=True):
        torch.save(network.float().state_dict(), folder / name)
    return folder / "alexnet.pth", folder / "alex.pth"


@pytest.fixture(scope="module")
def model(files) -> LPIPS:
    return load_lpips(*files)


@pytest.fixture
def pictures() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (2, 3, *SIZE, 3)).astype(np.uint8)


def distance(model, a, b):
    return lpips_distance(model, a, b, batch_size=2)


def test_the_numbers_are_those_of_pytorch(model, networks, pictures):
    a, b = pictures
    b[1] = a[1] // 2 + 40  # another contrast, not only noise
    b[2] = np.roll(a[2], 3, axis=1)
    expected = torch_distance(*networks, a, b)
    assert (expected > 1e-3).all()
    np.testing.assert_allclose(distance(model, a, b), expected, rtol=1e-5)


def test_equal_pictures_are_at_no_distance_and_order_does_not_matter(model, pictures):
    a, b = pictures
    assert distance(model, a, a).tolist() == [0, 0, 0]
    np.testing.assert_allclose(distance(model, a, b), distance(model, b, a), rtol=1e-6)


def test_black_pictures_have_finite_distances(model):
    black = np.zeros((1, *SIZE, 3), np.uint8)
    found = distance(model, black, 255 - black)
    assert np.isfinite(found).all()
    assert (found > 0).all()


def test_it_grows_with_noise(model):
    random = np.random.default_rng(1)
    rows, columns = np.mgrid[: SIZE[0], : SIZE[1]]
    clean = np.stack([rows * 5, columns * 4, rows + columns * 2], -1).clip(0, 255)
    noise = random.normal(size=clean.shape)
    levels = [0, 4, 16, 64]
    noisy = np.stack([(clean + level * noise).clip(0, 255) for level in levels]).astype(np.uint8)
    found = distance(model, np.stack([clean.astype(np.uint8)] * 4), noisy)
    assert found[0] == 0
    assert (np.diff(found) > 0).all(), found


def test_one_program_for_any_number_of_pairs(model, pictures):
    a, b = pictures
    whole = distance(model, a, b)
    before = lpips._distance._cache_size()
    each = [distance(model, a[i : i + 1], b[i : i + 1])[0] for i in range(3)]
    assert lpips._distance._cache_size() == before
    np.testing.assert_allclose(each, whole, rtol=1e-6)
    assert distance(model, a[:0], b[:0]).shape == (0,)


def test_pictures_that_cannot_be_compared(model, pictures):
    a, b = pictures
    with pytest.raises(ValueError, match="expected equal shapes"):
        distance(model, a, b[:2])
    with pytest.raises(UserError, match="31 x 31 pixels or more, found 96 x 30"):
        distance(model, a[:, :30], b[:, :30])


def test_the_smallest_pictures_pass_the_network():
    side = lpips.LEAST_SIDE
    pair = [jax.ShapeDtypeStruct((1, side, side, 3), np.uint8)] * 2
    model = LPIPS()
    features = jax.eval_shape(model._features, pair[0])
    assert features[-1].shape == (1, 1, 1, 256)


@pytest.mark.parametrize("number", [0, 1])
def test_files_that_do_not_fit_are_refused(files, tmp_path, number):
    missing = [*files]
    missing[number] = tmp_path / "gone.pth"
    with pytest.raises(UserError, match=r"gone\.pth: no such file"):
        load_lpips(*missing)
    tensors = torch.load(files[number], weights_only=True)
    first = next(name for name in tensors if "weight" in name)
    wrong = {**tensors, first: tensors[first][:, :-1], "head.weight": torch.zeros(2)}
    torch.save(wrong, tmp_path / "wrong.pth")
    damaged = [*files]
    damaged[number] = tmp_path / "wrong.pth"
    with pytest.raises(UserError) as caught:
        load_lpips(*damaged)
    assert f"wrong shape: {first}" in str(caught.value)
    assert "unused: head.weight [2]" in str(caught.value)


def test_a_file_for_the_other_is_refused(files):
    with pytest.raises(UserError, match=r"missing: features\.0\.weight"):
        load_lpips(files[1], files[0])
