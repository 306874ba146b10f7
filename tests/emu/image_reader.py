"""Runs native/modimage on images, built with sanitizers where the compiler has them."""

from __future__ import annotations

import contextlib
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.patience import SECONDS

_NATIVE = Path(__file__).resolve().parents[2] / "native"
_SOURCES = [
    *(path for path in sorted((_NATIVE / "modimage").glob("*.cpp")) if path.stem[:5] != "test_"),
    _NATIVE / "common" / "fatbin.cpp",
]
_INCLUDE = [f"-I{_NATIVE / 'common'}", f"-I{_NATIVE / 'modimage'}"]
_SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]

LIMITED, WHOLE, WRAPPER_1, WRAPPER_2 = range(4)


@dataclass(frozen=True)
class Image:
    known: bool
    by_address_alone: bool
    heap: bool
    managed: bool
    length: int
    linked_from: int
    why: str
    variables: tuple[str, ...]
    constants: tuple[str, ...]
    addresses: tuple[tuple[str, int, bool], ...]


def build(folder: Path, program: str = "test_read") -> Path:
    """native/modimage/`program`.cpp with the sources that it tests."""
    target = folder / program
    sources = [*_SOURCES, _NATIVE / "modimage" / f"{program}.cpp"]
    probe = subprocess.run(
        ["g++", *_SANITIZERS, "-x", "c++", "-", "-o", str(folder / "probe")],
        input=b"int main() {}",
        capture_output=True,
        check=False,
    )
    flags = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror"]
    flags += _SANITIZERS if probe.returncode == 0 else []
    command = ["g++", *flags, *_INCLUDE, *map(str, sources), "-o", str(target), "-ldl"]
    subprocess.run(command, check=True)
    return target


class Program:
    """It stays; a crash or a sanitizer's report fails what was asked and starts a new one."""

    def __init__(self, program: Path) -> None:
        self._program = program
        self._start()

    def _start(self) -> None:
        self._log = self._program.with_suffix(".log").open("w+")
        self._process = subprocess.Popen(
            [self._program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log
        )

    def close(self) -> None:
        report, code = self._end()
        assert code == 0, report

    def _end(self) -> tuple[str, int]:
        with self._process as process, self._log as log:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            code = process.wait(SECONDS)
            log.seek(0)
            return log.read(), code

    def _crashed(self) -> AssertionError:
        report, code = self._end()
        self._start()
        return AssertionError(f"the reader ended with {code}: {report}")

    def line(self) -> list[str]:
        """The next line of output, split at the spaces."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline().decode()
        if not line.endswith("\n"):
            raise self._crashed()
        return line[:-1].split(" ")

    def ask(self, data: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._crashed() from None


def _text(digits: str) -> str:
    return bytes.fromhex(digits).decode(errors="replace")


class Reader(Program):
    def _answer(self) -> Image:
        line = self.line()
        known, by_address_alone, heap, managed, length, linked_from, why, _, *names = line
        middle = names.index("|")
        last = names.index("|", middle + 1)
        addresses = names[last + 1 :]
        return Image(
            known == "1",
            by_address_alone == "1",
            heap == "1",
            managed == "1",
            int(length),
            int(linked_from),
            bytes.fromhex(why).decode(),
            tuple(_text(name) for name in names[:middle]),
            tuple(_text(name) for name in names[middle + 1 : last]),
            tuple(
                (_text(name), int(at), code == "1")
                for name, at, code in zip(*(addresses[i::3] for i in range(3)), strict=True)
            ),
        )

    def _ask(self, how: int, parts: tuple[bytes, ...]) -> None:
        frame = [struct.pack("<II", how, len(parts))]
        for part in parts:
            frame += [struct.pack("<Q", len(part)), part]
        self.ask(b"".join(frame))

    def limited(self, image: bytes) -> Image:
        """Read with the size of the bytes given as the limit."""
        self._ask(LIMITED, (image,))
        return self._answer()

    def read(self, *parts: bytes, how: int = WHOLE) -> Image:
        """Read a sound image without a limit; its copy must read the same when it is gone."""
        self._ask(how, parts)
        image, copy = self._answer(), self._answer()
        if image.known:
            assert copy == image
        return image
