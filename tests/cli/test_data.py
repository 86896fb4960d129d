"""Text: what is read, and what each rank sees of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from fullshard.cli import data
from fullshard.cli.data import Text, read_text
from fullshard.cli.problems import BadInput

ALPHABET = Text(bytes(range(256)) * 4, "all bytes")


def test_without_a_folder_the_standard_library_is_read() -> None:
    text = read_text("")

    assert "standard library" in text.description
    assert b"import " in bytes(text.bytes[:100_000].tolist())


def test_a_step_is_the_same_whatever_ranks_it_is_split_over() -> None:
    whole = ALPHABET.batch(7, 3, range(8), 16)

    for ranks in (2, 4, 8):
        size = 8 // ranks
        parts = [ALPHABET.batch(7, 3, range(r * size, (r + 1) * size), 16) for r in range(ranks)]
        assert torch.equal(torch.cat(parts), whole)


def test_seeds_steps_and_sequences_differ() -> None:
    batches = [
        ALPHABET.batch(0, 1, range(8), 16),
        ALPHABET.batch(0, 2, range(8), 16),
        ALPHABET.batch(1, 1, range(8), 16),
    ]

    assert len({tuple(batch.flatten().tolist()) for batch in batches}) == 3
    assert len({tuple(row.tolist()) for row in batches[0]}) > 1


def test_sequences_are_pieces_of_the_text_and_reach_its_end() -> None:
    text = Text(b"0123456789", "digits")
    rows = text.batch(0, 0, range(64), 8)

    assert {bytes(row.tolist()) for row in rows} == {b"012345678", b"123456789"}


def test_text_files_are_read_in_order_and_others_are_not(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "2.txt").write_text("second")
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "zero.txt").write_bytes(b"a\0b")
    (tmp_path / ".hidden").write_text("hidden")
    os.mkfifo(tmp_path / "pipe")  # whoever reads from it waits for one who writes

    assert bytes(read_text(str(tmp_path)).bytes.tolist()) == b"first\nsecond"


def test_of_a_file_larger_than_memory_the_beginning_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "MAXIMUM_BYTES", 5)
    with (tmp_path / "corpus.txt").open("wb") as file:
        file.write("schnö".encode())  # the fifth byte is in the middle of a character
        file.truncate(2**40)  # a hole, which takes no room on the disk

    assert bytes(read_text(str(tmp_path)).bytes.tolist()) == "schnö".encode()[:5]


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(bytes(range(256)))

    with pytest.raises(BadInput, match="there is no text below"):
        read_text(str(tmp_path))
    with pytest.raises(BadInput, match="is not a folder"):
        read_text(str(tmp_path / "nowhere"))
