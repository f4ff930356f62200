"""What the stages' tests share: a tiny model, features, and the networks and batch of a stage.

Each file has a fixture `stage`, and its own of these where it needs another.
"""

from pathlib import Path
from typing import Any

import pytest
from tiny_games import batch_of, write_model
from tiny_sets import write_features_set
from tiny_stage import one_device

from animegamer_jax.bundle.bundle import Bundle


@pytest.fixture(scope="session")
def features(tmp_path_factory) -> Path:
    return write_features_set(tmp_path_factory.mktemp("features") / "set", 2)


@pytest.fixture(scope="session")
def bundle(tmp_path_factory) -> Bundle:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def networks(stage, bundle) -> dict[str, Any]:
    return stage.load(bundle, mesh=one_device())


@pytest.fixture(scope="module")
def batch(stage, features) -> Any:
    return batch_of(stage, features, 8)
