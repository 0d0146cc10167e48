from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.pages import DOCS


@pytest.fixture
def messages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("documentation_messages", DOCS / "messages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def write(folder: Path, code: str) -> Path:
    package = folder / "graphpipe"
    package.mkdir()
    (package / "errors.py").write_text("class PlanError(Exception): ...\n", encoding="utf-8")
    (package / "part.py").write_text(code, encoding="utf-8")
    return folder


def test_texts_are_found_with_what_is_filled_in(messages: ModuleType, tmp_path: Path) -> None:
    code = (
        "def check(n):\n"
        "    raise PlanError(f'Stage {n} is ' + 'odd', fix='Make it <even>')\n"
        "def other():\n"
        "    return ValueError('not ours')\n"
    )
    [found] = messages.messages(write(tmp_path, code))
    assert found.text == "Stage ... is odd"
    assert found.module == "graphpipe.part"
    text = messages.index(tmp_path)
    assert text.startswith(
        "`Stage ... is odd`\n: `PlanError` of `graphpipe.part`. Make it \\<even>."
    )


def test_every_package_has_messages_in_the_index(messages: ModuleType) -> None:
    text = messages.index(DOCS.parent / "src")
    for package in ("graph", "cost", "plan", "planner", "runtime", "report"):
        assert f"`graphpipe.{package}." in text
