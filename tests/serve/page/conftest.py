"""A server of a player without networks, and a browser; imports the package only in fixtures."""

from collections.abc import Iterator
from typing import Any

import pytest
from browser import open_browser, open_page


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> Iterator[str]:
    from served import serving_fake

    with serving_fake(tmp_path_factory.mktemp("page") / "games", 4, 0.02) as (found, _):
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as found:
        yield found


@pytest.fixture
def opened(browser, address):
    """A page on a wide screen, of which nothing may go wrong."""
    from page_games import ENDED, SECONDS, STILL, WIDE, ready

    with open_page(browser, address, may_fail=ENDED, **WIDE, **STILL) as (page, wrong):
        page.set_default_timeout(SECONDS)
        ready(page)
        yield page
        assert wrong == []
