"""Files are read strictly: what is wrong is refused with the path of the field."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import Field

from graphpipe.errors import FileFormatError
from graphpipe.records import FileRecord, Record


class Part(Record):
    size: int = Field(ge=0)


class Thing(FileRecord):
    file_kind: ClassVar[str] = "test-thing"
    written_by: ClassVar[str] = "graphpipe thing -o FILE"
    file_version: ClassVar[int] = 3

    kind: str = file_kind
    version: int = file_version
    factor: float = 1.0
    parts: tuple[Part, ...] = ()


THING = Thing(factor=0.1, parts=(Part(size=1), Part(size=2)))


def test_a_saved_record_is_read_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "thing.json"
    THING.save(path)
    assert Thing.load(path) == THING
    assert [item.name for item in tmp_path.iterdir()] == ["thing.json"]


def test_saving_into_a_bare_file_name_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    THING.save("thing.json")
    assert Thing.load("thing.json") == THING


def test_a_failed_save_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "thing.json"
    THING.save(path)

    def fail(self: Path, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(FileFormatError, match="disk full"):
        Thing(factor=2.0).save(path)
    monkeypatch.undo()
    assert Thing.load(path) == THING
    assert [item.name for item in tmp_path.iterdir()] == ["thing.json"]


def test_saving_into_a_missing_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="Cannot write the test-thing file"):
        THING.save(tmp_path / "missing" / "thing.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"parts": [{"size": 1}, {"size": -1}]}', r"field 'parts\.1\.size'"),
        ('{"parts": [{"size": "1"}]}', r"field 'parts\.0\.size'"),
        ('{"parts": [{}]}', r"field 'parts\.0\.size'.*required"),
        ('{"factor": NaN}', "factor"),
        ('{"factor": Infinity}', "factor"),
        ('{"factor": 1e999}', "factor"),
        ('{"factor": true}', "factor"),
        ('{"colour": 1}', "field 'colour'"),
        ('{"kind": "test-thing"', "EOF|end"),
        ("[]", r"\(top level\)"),
        ("", "EOF|end|expected"),
        ('{"version": 2}', "field 'version'.*Expected 3, got 2"),
        ('{"kind": "graphpipe-plan"}', "field 'kind'"),
        ("[" * 100_000, "test-thing"),
    ],
)
def test_what_is_wrong_is_refused_with_its_field(text: str, message: str) -> None:
    with pytest.raises(FileFormatError, match=message):
        Thing.from_json(text, where="thing.json")


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "thing.json"
    path.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(FileFormatError, match="test-thing"):
        Thing.load(path)


def test_a_file_of_something_else_is_told_by_its_beginning() -> None:
    for text in ("a picture, say", b"\x89PNG\r\n"):
        with pytest.raises(FileFormatError) as caught:
            Thing.from_json(text, where="thing.png")
        begins = text if isinstance(text, str) else "\ufffdPNG\r\n"
        assert f"a file that begins with {begins!r}" in str(caught.value)
        assert "'graphpipe thing -o FILE' writes such a file." in str(caught.value)
        assert "b'" not in str(caught.value)
    with pytest.raises(FileFormatError, match="Got an empty file"):
        Thing.from_json("")


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"No such file.*graphpipe thing"):
        Thing.load(tmp_path / "nothing.json")
    with pytest.raises(FileFormatError, match="directory"):
        Thing.load(tmp_path)
