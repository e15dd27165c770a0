"""Files are whole or not there, and what is no file stays what it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autoplan.whole_file import write_whole


def test_a_file_is_replaced_and_nothing_is_left_beside(tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    for text in ("first", "second, longer"):
        write_whole(target, text)
        assert target.read_text() == text
    assert list(tmp_path.iterdir()) == [target]
    assert target.stat().st_mode & 0o777 == 0o644


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "elsewhere" / "plan.json", tmp_path / "latest.json"
    target.parent.mkdir()
    link.symlink_to(target)
    for text in ("first", "second"):  # also where it points at nothing yet
        write_whole(link, text)
        assert link.is_symlink() and target.read_text() == text


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, "through")
        assert os.read(reader, 100) == b"through"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        write_whole(tmp_path, "over a folder")
    with pytest.raises(OSError):
        write_whole(tmp_path / "missing" / "plan.json", "nowhere")
    with pytest.raises(UnicodeEncodeError):
        write_whole(tmp_path / "plan.json", "\udc00")
    assert list(tmp_path.iterdir()) == []
