from __future__ import annotations

from pathlib import Path

import pytest

from graphpipe.errors import FileFormatError
from graphpipe.report.files import write_text


def test_text_is_written_as_utf_8(tmp_path: Path) -> None:
    write_text(tmp_path / "a.txt", "µs", what="the text")
    assert (tmp_path / "a.txt").read_bytes() == b"\xc2\xb5s"


def test_a_missing_folder_is_told(tmp_path: Path) -> None:
    with pytest.raises(
        FileFormatError, match=r"Cannot write the text: No such file.*nowhere.a.txt"
    ):
        write_text(tmp_path / "nowhere" / "a.txt", "", what="the text")
