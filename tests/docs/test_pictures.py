from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.docs.pages import DOCS


def test_pictures_are_what_the_script_draws(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(DOCS / "pictures" / "make.py"), str(tmp_path)], check=True)
    drawn = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.svg")}
    kept = {p.name: p.read_text(encoding="utf-8") for p in (DOCS / "pictures").glob("*.svg")}
    assert drawn == kept, "run python docs/pictures/make.py"
