"""Cubins as files: what is in their tables, and ways to change it."""

from __future__ import annotations

import struct


class Cubin:
    """Reads and changes a cubin, by the ELF specification."""

    def __init__(self, code: bytes) -> None:
        self.code = bytearray(code)
        (self.table,) = struct.unpack_from("<Q", code, 40)
        self.count, self.names = struct.unpack_from("<HH", code, 60)

    def section(self, index: int) -> tuple[int, ...]:
        """Name, type, flags, address, offset, size, link, info, alignment, size of an entry."""
        return struct.unpack_from("<IIQQQQIIQQ", self.code, self.table + 64 * index)

    def name(self, strings: int, offset: int) -> str:
        start = self.section(strings)[4] + offset
        return bytes(self.code[start : self.code.index(0, start)]).decode()

    def find(self, name: str) -> int:
        names = [self.name(self.names, self.section(i)[0]) for i in range(self.count)]
        return names.index(name)

    def set_section(self, index: int, **fields: int) -> None:
        places = {"type": ("<I", 4), "offset": ("<Q", 24), "size": ("<Q", 32), "link": ("<I", 40)}
        for field, value in fields.items():
            form, place = places[field]
            struct.pack_into(form, self.code, self.table + 64 * index + place, value)

    def symbols(self) -> list[tuple[int, tuple[int, ...]]]:
        """Place, and name, info, other, section, value, size."""
        _, _, _, _, offset, size, *_ = self.section(self.find(".symtab"))
        places = range(offset, offset + size, 24)
        return [(place, struct.unpack_from("<IBBHQQ", self.code, place)) for place in places]

    def variables(self) -> set[str]:
        homes = {
            index
            for index in range(self.count)
            if self.name(self.names, self.section(index)[0])
            in (".nv.global", ".nv.global.init", ".nv.constant3")
        }
        strings = self.section(self.find(".symtab"))[6]
        return {
            self.name(strings, symbol[0])
            for _, symbol in self.symbols()
            if symbol[1] & 15 in (1, 13) and symbol[3] in homes
        }

    def contents(self, name: str) -> bytes:
        _, _, _, _, offset, size, *_ = self.section(self.find(name))
        return bytes(self.code[offset : offset + size])

    def put(self, name: str, at: int, value: bytes) -> None:
        """Overwrites bytes of a section."""
        place = self.section(self.find(name))[4] + at
        self.code[place : place + len(value)] = value

    def symbol(self, name: str) -> tuple[int, int, tuple[int, ...]]:
        """Number, place, and fields of the symbol of that name."""
        strings = self.section(self.find(".symtab"))[6]
        for number, (place, symbol) in enumerate(self.symbols()):
            if symbol[0] and self.name(strings, symbol[0]) == name:
                return number, place, symbol
        raise KeyError(name)

    def relocations(self, table: str) -> list[tuple[int, int, int, int]]:
        """Offset, type, number of the symbol, addend."""
        return [
            (offset, info & 0xFFFFFFFF, info >> 32, addend)
            for offset, info, addend in struct.iter_unpack("<QQq", self.contents(table))
        ]

    def set_relocations(self, table: str, entries: list[tuple[int, int, int, int]]) -> None:
        """Writes a table anew that is no longer than before."""
        packed = b"".join(
            struct.pack("<QQq", offset, kind | number << 32, addend)
            for offset, kind, number, addend in entries
        )
        self.put(table, 0, packed)
        self.set_section(self.find(table), size=len(packed))

    def resolve(self, name: str, address: int) -> None:
        """Kernels find the variable there: its slot loses its relocation and holds the address."""
        number, *_ = self.symbol(name)
        table = self.relocations(".rela.nv.constant4")
        (slot,) = [offset for offset, _, symbol, _ in table if symbol == number]
        self.set_relocations(".rela.nv.constant4", [e for e in table if e[2] != number])
        self.put(".nv.constant4", slot, struct.pack("<Q", address))
