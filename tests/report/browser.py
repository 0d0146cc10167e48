"""A headless Chromium for tests of pages; the tests skip where there is none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ARTEFACTS = Path(__file__).parents[2] / "out" / "test-artefacts"
"""Screenshots are kept here; the folder is not under version control."""

_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--window-size=1500,1200",
)  # fmt: skip


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A selenium driver; its browser log has every message of the console."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    binary = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("needs chromium and chromedriver (on Debian: apt install chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*_FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(driver)
    browser = webdriver.Chrome(options=options, service=service)
    try:
        yield browser
    finally:
        browser.quit()


def screenshot(browser: Any, name: str) -> Path:
    """Keeps a picture of the whole page."""
    ARTEFACTS.mkdir(parents=True, exist_ok=True)
    height = browser.execute_script("return document.documentElement.scrollHeight")
    size = browser.get_window_size()
    browser.set_window_size(1500, height + 140)
    path = ARTEFACTS / f"{name}.png"
    browser.save_screenshot(str(path))
    browser.set_window_size(size["width"], size["height"])
    return path
