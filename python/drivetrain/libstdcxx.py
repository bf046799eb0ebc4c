"""Says whether a native module uses the shared libstdc++, as torch does, or carries a copy of its own.

CMakeLists.txt runs this file by itself after linking the module, and `drivetrain doctor` asks about the installed one.
"""

import struct
import sys
from collections.abc import Iterator
from pathlib import Path

SHARED = b"libstdc++.so.6"
# std::locale::classic(): every stream needs it, and a module that uses the shared library never defines it.
LOCALE = b"_ZNSt6locale7classicEv"
_SYMBOL_TABLES = (2, 11)  # section types of ELF: of all symbols, of those for the dynamic linker
_DYNAMIC = 6
_NEEDED = 1


def find_problem(module: Path) -> str:
    """Returns how the module has its libstdc++ if that is not the shared one, else an empty string.

    Raises:
        ValueError: the file is not a 64-bit little-endian ELF file.
    """
    data = module.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"{module} is not a 64-bit little-endian ELF file")
    needed, defines_locale = set(), False
    for kind, entries, strings in _tables(data):
        if kind == _DYNAMIC:
            pairs = struct.iter_unpack("<QQ", entries)
            needed |= {_string(strings, value) for tag, value in pairs if tag == _NEEDED}
        else:
            names = set(_places(strings, LOCALE + b"\0"))
            symbols = struct.iter_unpack("<IBBHQQ", entries) if names else ()
            defines_locale |= any(name in names and section for name, _, _, section, _, _ in symbols)
    if defines_locale:
        return "defines std:: streams and locales of its own"
    return "" if SHARED in needed else f"does not ask for {SHARED.decode()}"


def _tables(data: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Each dynamic section and symbol table: its type, its entries, the strings that belong to it."""
    (offset,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, offset + i * size) for i in range(count)]
    contents = [data[each[4] : each[4] + each[5]] for each in headers]
    for header, entries in zip(headers, contents, strict=True):
        if header[1] in (*_SYMBOL_TABLES, _DYNAMIC):
            yield header[1], entries, contents[header[6]]


def _string(strings: bytes, begin: int) -> bytes:
    return strings[begin : strings.index(b"\0", begin)]


def _places(strings: bytes, wanted: bytes) -> Iterator[int]:
    place = strings.find(wanted)
    while place >= 0:
        yield place
        place = strings.find(wanted, place + 1)


def main(module: str, compiler: str) -> None:
    """Ends the program with the cure if the module that the compiler has linked has a copy of its own."""
    if problem := find_problem(Path(module)):
        sys.exit(
            f"drivetrain: {Path(module).name} {problem}: {compiler} links libstdc++ statically. Beside torch, which "
            "uses the shared one, the module would crash. Point CXX at a g++ that is no such wrapper, take "
            "-static-libstdc++ out of CXXFLAGS and LDFLAGS, and see that the linker finds libstdc++.so.6 "
            "(LDFLAGS=-L...)."
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
