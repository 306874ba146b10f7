"""What the replay engine does about each function of the table, over a driver that does nothing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from flowgpu import launch, wire
from flowgpu.wire import Engine, Message, Status
from tests.emu import intercept_lib as lib
from tools import gen_intercept

PROTOTYPES = gen_intercept.prototypes(gen_intercept.cuda_include())
ROWS = {row.family: row for row in gen_intercept.read_table()}
ROW_OF = {symbol: ROWS[gen_intercept.family_of(symbol)] for symbol in PROTOTYPES}
BY_REPLAY = [s for s, row in sorted(ROW_OF.items()) if row.replay in ("refuse", "lives")]
BY_BOTH = [s for s, row in sorted(ROW_OF.items()) if row.treatment == "REFUSE"]
BY_BOTH.append("cuIpcGetMemHandle")  # its handler's refusal
DRIVER = launch.library_dir().parent / "bin" / "libflowgpu_do_nothing_driver.so"


@pytest.fixture(scope="module")
def call_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("programs") / "call_one"
    return lib.compile_program("call_one.c", output, str(DRIVER), f"-Wl,-rpath,{DRIVER.parent}")


@pytest.mark.parametrize("symbol", BY_REPLAY + BY_BOTH)
def test_what_the_table_refuses_is_refused_by_its_name_once_it_was_called(
    symbol: str, call_one: Path, tmp_path: Path
) -> None:
    kinds = "".join("p" if "*" in one else "0" for one in PROTOTYPES[symbol].split(","))
    environment = dict(os.environ) | {
        "LD_PRELOAD": str(launch.intercept_library()),
        "FLOWGPU_REAL_LIBCUDA": str(DRIVER),
        "FLOWGPU_REPLAY": "1",
        "FLOWGPU_SOCKET": str(tmp_path / "task.sock"),
    }
    with (
        lib.Coordinator(tmp_path / "task.sock") as coordinator,
        subprocess.Popen(
            [call_one, symbol, kinds],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as program,
    ):
        task = coordinator.accept()
        native, replay = (wire.Ask(one).pack() for one in (Engine.NATIVE, Engine.REPLAY))
        for question in (native, replay):
            assert task.ask(Message.ASK, question).status == Status.OK
        assert program.stdin and program.stdout
        program.stdin.write("\n")
        program.stdin.flush()
        assert program.stdout.readline() == "0\n"
        refusal = (Status.REFUSED, symbol)
        reply = task.ask(Message.ASK, replay)
        assert (reply.status, reply.detail) == refusal
        reply = task.ask(Message.ASK, native)
        assert (reply.status, reply.detail) == (refusal if symbol in BY_BOTH else (Status.OK, ""))
        program.stdin.close()
        assert program.wait(lib.SECONDS) == 0
