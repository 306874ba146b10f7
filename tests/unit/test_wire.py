"""flowgpu/wire.py is what wire.h declares, to the byte."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowgpu import wire

ROOT = Path(__file__).resolve().parents[2]
HEADER = ROOT / "native" / "include" / "flowgpu" / "wire.h"
STRUCTS = {
    "header": wire.Header,
    "hello": wire.Hello,
    "gate": wire.Gate,
    "ask": wire.Ask,
    "rebuild": wire.Rebuild,
    "reply": wire.Reply,
    "block": wire.Block,
    "asker": wire.Asker,
    "host": wire.Host,
    "allocation": wire.Allocation,
    "write": wire.Write,
    "watched": wire.Watched,
    "control_page": wire.ControlPage,
}
CHOICE, U32, U64 = st.integers(0, 2), *(st.integers(0, 2**bits - 1) for bits in (32, 64))


def run_generator(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "gen_wire.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_generated_file_is_fresh() -> None:
    done = run_generator("--check")
    assert done.returncode == 0, done.stderr


def test_sizes_are_those_that_the_header_asserts() -> None:
    asserted = re.findall(r"sizeof\((?:struct )?flowgpu_(\w+)\) == (\d+)", HEADER.read_text())
    assert {name: int(size) for name, size in asserted} == {
        name: kind.SIZE for name, kind in STRUCTS.items()
    }


@given(pid=U32, version=U32, resumed=CHOICE, devices=U32, replay=CHOICE, low=U64, high=U64)
def test_hello_comes_back_as_it_was(
    pid: int, version: int, resumed: int, devices: int, replay: int, low: int, high: int
) -> None:
    hello = wire.Hello(pid, version, resumed, devices, replay, low, high)
    assert wire.Hello.unpack(hello.pack()) == hello


@given(timeout=U32, wait=U32, live=U64, engine=st.sampled_from(wire.Engine))
def test_requests_name_their_engine(
    timeout: int, wait: int, live: int, engine: wire.Engine
) -> None:
    gate = wire.Gate(timeout, wait, live, engine)
    assert wire.Gate.unpack(gate.pack()) == gate
    assert wire.Ask.unpack(wire.Ask(engine).pack()) == wire.Ask(engine)


def test_a_rebuild_names_the_devices_that_it_is_to_see() -> None:
    rebuild = wire.Rebuild("GPU-1,GPU-2")
    assert wire.Rebuild.unpack(rebuild.pack()) == rebuild


@given(detail=st.text(max_size=300), blocks=U64, result=st.integers(-(2**31), 2**31 - 1))
def test_a_reply_comes_back_with_what_fits_of_its_text(
    detail: str, blocks: int, result: int
) -> None:
    reply = wire.Reply(wire.Message.GATE, wire.Status.OK, result, 0, blocks, 0, 0, 0, detail)
    again = wire.Reply.unpack(reply.pack())
    assert (again.blocks, again.driver_result) == (blocks, result)
    whole = detail.split("\0")[0]
    assert again.detail == whole or len(detail.encode()) >= 256


def test_a_row_has_no_header() -> None:
    row = wire.Block(1, 2, 3, 4, owner_low=5, owner_high=6, owner_id=7)
    assert row.pack() == struct.pack("=QQQIIQQQ", 1, 2, 3, 4, 0, 5, 6, 7)
    assert wire.Block.unpack(row.pack()) == row


@pytest.mark.parametrize("at", range(16))
def test_a_header_with_another_byte_is_refused(at: int) -> None:
    data = bytearray(wire.Gate(5, 0, 0, 0).pack())
    data[at] ^= 0x80
    if at >= 12:
        # The count means something in messages with rows only.
        assert wire.Gate.unpack(bytes(data)).timeout_ms == 5
    else:
        with pytest.raises(wire.WireError):
            wire.Gate.unpack(bytes(data))


def test_reserved_fields_must_be_zero() -> None:
    for message in (
        wire.Gate(1, 2, 3, 0),
        wire.Ask(0),
        wire.Asker(1, 2, 3),
    ):
        data = bytearray(message.pack())
        data[-1] = 1
        with pytest.raises(wire.WireError, match="reserved"):
            type(message).unpack(bytes(data))


def test_another_message_or_length_is_refused() -> None:
    with pytest.raises(wire.WireError, match="HELLO where GATE"):
        wire.Gate.unpack(wire.Hello(1, 2, 0, 1, 0, 0, 0).pack())
    with pytest.raises(wire.WireError):
        wire.Gate.unpack(wire.Gate(5, 0, 0, 0).pack() + b"\0")
    with pytest.raises(wire.WireError):
        wire.split(wire.packet(wire.Message.END)[:-1] + b"\1\0")


def test_the_generator_refuses_what_it_does_not_understand(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import gen_wire
    finally:
        sys.path.pop(0)
    with pytest.raises(gen_wire.GenerateError):
        gen_wire.parse_structs("struct flowgpu_x {\n    float ratio;\n};")
    with pytest.raises(gen_wire.GenerateError):
        gen_wire.parse_enums("enum flowgpu_x {\n    FLOWGPU_A,\n};")
    with pytest.raises(gen_wire.GenerateError):
        gen_wire.parse_faults("FAULT(a)")
