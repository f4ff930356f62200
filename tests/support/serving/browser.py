"""A real browser for tests: Debian's Chromium, driven by Playwright; skipped where it is absent."""

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

_FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


@contextlib.contextmanager
def open_browser() -> Iterator[Any]:
    """A headless browser."""
    api = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no chromium on this machine (Debian's package chromium)")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=list(_FLAGS))
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def open_page(
    browser: Any, address: str, *, may_fail: tuple[str, ...] = (), **options: Any
) -> Iterator[tuple[Any, list[str]]]:
    """A page, and what went wrong on it so far: errors of the console, of scripts, of requests.

    Requests whose address has a part out of `may_fail` may fail.
    """
    context = browser.new_context(**options)
    page, wrong = context.new_page(), []
    page.on("console", lambda m: wrong.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))

    def note_failed(request: Any) -> None:
        if not any(part in request.url for part in may_fail):
            wrong.append(request.url[:200])

    page.on("requestfailed", note_failed)
    try:
        page.goto(address)
        yield page, wrong
    finally:
        context.close()
