"""What the replay engine does about each function of the table, over drivers that do nothing.

Those answer at once, so what is seen is the intercept library's.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from cuda.bindings.driver import CUresult

from flowgpu import launch, wire
from flowgpu.wire import Engine, Message, Status
from tests.emu import intercept_lib as lib
from tools import gen_intercept

PROTOTYPES = gen_intercept.prototypes(gen_intercept.cuda_include())
ROWS = {row.family: row for row in gen_intercept.read_table()}
ROW_OF = {symbol: ROWS[gen_intercept.family_of(symbol)] for symbol in PROTOTYPES}
BY_REPLAY = [s for s, row in sorted(ROW_OF.items()) if row.replay in ("refuse", "lives")]
BY_BOTH = [s for s, row in sorted(ROW_OF.items()) if row.treatment == "REFUSE"]
BY_BOTH += ["cuIpcGetMemHandle", "cuIpcOpenMemHandle", "cuIpcOpenMemHandle_v2"]  # by handlers
BY_BOTH += ["cuMemExportToShareableHandle", "cuMemImportFromShareableHandle"]  # of others' memory
BY_BOTH += ["cuIpcGetEventHandle", "cuIpcOpenEventHandle"]
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


def _given(library: Path, *made: str) -> dict[tuple[str, int, int], CUresult]:
    """What each call of test_handles was answered, by function, argument and field."""
    driver = DRIVER.with_name("libflowgpu_test_handles_driver.so")
    done = subprocess.run(
        [DRIVER.with_name("test_handles"), library, *made],
        env=dict(os.environ) | {"FLOWGPU_REAL_LIBCUDA": str(driver), "FLOWGPU_REPLAY": "1"},
        capture_output=True,
        text=True,
        timeout=lib.SECONDS,
    )
    assert (done.returncode, done.stderr) == (0, "")
    answers = {}
    for line in done.stdout.splitlines():
        function, argument, field, result = line.split()
        answers[function, int(argument), int(field)] = CUresult(int(result))
    return answers


def test_the_driver_is_given_its_own_handles_and_none_of_the_programs() -> None:
    """Every function is tried, in each argument, list of nodes and field of a structure it reads.

    Each is given alone, to a driver that looks through the words of all that it is given. Not
    covered: arguments of kernels, lists that are not const (cuStreamUpdateCaptureDependencies),
    handles that the driver gives, private tables, and a structure that the engine does not know.
    """
    by_themselves = _given(DRIVER.with_name("libflowgpu_test_handles_driver.so"))
    assert set(by_themselves.values()) == {CUresult.CUDA_ERROR_INVALID_HANDLE}  # each is seen
    text = (gen_intercept.TABLE.parent / "replay/handles.h").read_text()
    handles = "|".join(re.findall(r"FG_KIND\((CU\w+),", text))
    plain = re.compile(rf"({handles}) \w+|const CUgraphNode \*\w+")
    places = {
        (symbol, number)
        for symbol, parameters in PROTOTYPES.items()
        for number, one in enumerate(parameters.split(","))
        if plain.fullmatch(one.strip())
    }
    assert len(places) > 400
    assert places <= {(symbol, number) for symbol, number, _ in by_themselves}
    answers = _given(launch.intercept_library(), "made")
    assert answers == dict.fromkeys(by_themselves, CUresult.CUDA_SUCCESS)
