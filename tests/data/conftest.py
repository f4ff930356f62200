"""Tiny features, their tokenizer, and windows of their turns."""

import pytest
from tiny_sets import NUM_GAMES, PROTOCOL, make_tokenizer, write_features_set

from animegamer_jax.data.datasets import open_features
from animegamer_jax.data.windows import Windows


@pytest.fixture(scope="module")
def features(tmp_path_factory):
    path = tmp_path_factory.mktemp("sets") / "features"
    return open_features(write_features_set(path, NUM_GAMES))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def windows(tokenizer):
    return Windows(tokenizer=tokenizer, protocol=PROTOCOL)
