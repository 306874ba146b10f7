"""Blocks that several tasks have: whose bytes they are, and what an image says of them."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.blocks import BlockTable, Token
from coordinator.sharing import ADDRESS, owner_of
from flowgpu import wire
from flowgpu.image.manifest import Import, Manifest, Task, check
from flowgpu.image.writer import ImageWriter
from tests.unit.test_image import maker

GRANULE = 2 << 20
FIRST, SECOND, GONE = (1, 11), (1, 22), (9, 99)
PIDS: dict[Token, int] = {FIRST: 100, SECOND: 200}


@pytest.fixture
def table() -> Iterator[BlockTable]:
    made = BlockTable()
    yield made
    made.close()


def add(table: BlockTable, pid: int, number: int, owner: Token = (0, 0), of: int = 0) -> None:
    row = wire.Block(number, number << 30, GRANULE, 0, owner[1], owner[0], of)
    table.add(pid, [row], [os.open("/dev/null", os.O_RDONLY)])


def names(table: BlockTable) -> dict[tuple[int, int], tuple[int, int] | None]:
    """The block that has the bytes of each import."""
    return {
        (one.pid, one.row.id): None if one.of is None else (one.of.pid, one.of.row.id)
        for one in table.imports()
    }


def test_the_bytes_of_an_import_are_its_owners(table: BlockTable) -> None:
    add(table, 100, 1)
    add(table, 100, 2, SECOND, 5)
    add(table, 200, 5)
    add(table, 200, 6, FIRST, 1)
    add(table, 200, 7, SECOND, 5)  # of its own, by way of a descriptor
    assert table.join_imports(PIDS) == []
    assert names(table) == {(100, 2): (200, 5), (200, 6): (100, 1), (200, 7): (200, 5)}
    assert [(one.pid, one.row.id) for one in table.saved()] == [(100, 1), (200, 5)]
    assert table.total_bytes() == 2 * GRANULE
    assert len(table.of(200)) == 3 and len(table.rows(200)) == 1


def test_what_an_owner_has_let_go_of_is_saved_with_one_importer(table: BlockTable) -> None:
    add(table, 100, 1)  # and not the block 3, which it had before
    add(table, 200, 5, FIRST, 3)
    add(table, 200, 6, GONE, 1)
    add(table, 100, 2, GONE, 1)
    adopted = table.join_imports(PIDS)
    assert sorted((one.pid, one.row.id) for one in adopted) == [(100, 2), (200, 5)]
    assert names(table) == {(200, 6): (100, 2)}
    assert table.total_bytes() == 3 * GRANULE


def test_who_listens_for_a_token_is_its_owner() -> None:
    token = (os.getpid(), int.from_bytes(os.urandom(7), "big"))
    assert owner_of(token) is None
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(ADDRESS.format(*token))
        listener.listen()
        assert owner_of(token) == os.getpid()
    assert owner_of(token) is None


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Manifest]:
    """A manifest of two tasks, the second of which has the first block of the first."""
    with ImageWriter(tmp_path / "out") as writer:
        maker.write_gpu_files(writer, 1)
        manifest = maker.manifest(writer, 1)
        owner = manifest.gpus[0].blocks[0]
        yield dataclasses.replace(
            manifest,
            tasks=(*manifest.tasks, Task(101, 0, 0)),
            imports=(Import(1, 7, 1 << 60, 0, owner.task, owner.id),),
        )


def test_imports_are_in_the_manifest_and_read_again(shared: Manifest, tmp_path: Path) -> None:
    assert Manifest.from_bytes(shared.to_bytes(), tmp_path) == shared
    assert b'"imports"' not in dataclasses.replace(shared, imports=()).to_bytes()


@pytest.mark.parametrize(
    "changed",
    [{"task": 2}, {"owner": 1}, {"block": 3}, {"address": (1 << 64) - 4096}, {"device": 1 << 32}],
    ids=str,
)
def test_an_import_that_does_not_fit_is_refused(shared: Manifest, changed: dict[str, int]) -> None:
    check(shared)
    bad = dataclasses.replace(shared.imports[0], **changed)
    with pytest.raises(ValueError, match="does not fit"):
        check(dataclasses.replace(shared, imports=(bad,)))


def test_neither_a_number_nor_an_address_is_there_twice(shared: Manifest) -> None:
    one, block = shared.imports[0], shared.gpus[0].blocks[0]
    for other in (
        one,
        dataclasses.replace(one, id=8, address=one.address + 4096),
        dataclasses.replace(one, task=block.task, id=block.id),
        dataclasses.replace(one, task=block.task, address=block.address),
    ):
        with pytest.raises(ValueError, match="does not fit"):
            check(dataclasses.replace(shared, imports=(one, other)))
