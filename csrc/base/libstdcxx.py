"""Checks that a native module uses the shared libstdc++, as torch does, instead of a static copy.

The build runs this file as a script after linking the module.
"""

import struct
import sys
from collections.abc import Iterator
from pathlib import Path

SHARED = b"libstdc++.so.6"
# Every stream needs std::locale::classic(), and a module that uses the shared library never defines it.
LOCALE = b"_ZNSt6locale7classicEv"
_SYMBOL_TABLES = (2, 11)  # ELF section types SHT_SYMTAB and SHT_DYNSYM
_DYNAMIC = 6
_NEEDED = 1


def find_problem(module: Path) -> str:
    """Describes how the module deviates from the shared libstdc++.

    Args:
        module: Path of the native module.

    Returns:
        A phrase that follows the module's name, or an empty string if the module uses the shared library.

    Raises:
        ValueError: The file is not a 64-bit little-endian ELF file.
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
            names = set(_offsets(strings, LOCALE + b"\0"))
            symbols = struct.iter_unpack("<IBBHQQ", entries) if names else ()
            defines_locale |= any(name in names and section for name, _, _, section, _, _ in symbols)
    if defines_locale:
        return "defines std:: streams and locales of its own"
    return "" if SHARED in needed else f"does not ask for {SHARED.decode()}"


def _tables(data: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Yields the type, the entries and the string table of each dynamic section and symbol table."""
    (offset,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, offset + i * size) for i in range(count)]
    contents = [data[each[4] : each[4] + each[5]] for each in headers]
    for header, entries in zip(headers, contents, strict=True):
        if header[1] in (*_SYMBOL_TABLES, _DYNAMIC):
            yield header[1], entries, contents[header[6]]


def _string(strings: bytes, begin: int) -> bytes:
    return strings[begin : strings.index(b"\0", begin)]


def _offsets(strings: bytes, wanted: bytes) -> Iterator[int]:
    offset = strings.find(wanted)
    while offset >= 0:
        yield offset
        offset = strings.find(wanted, offset + 1)


def main(module: str, compiler: str) -> None:
    """Exits with an error that names the remedy if the linked module contains its own libstdc++."""
    if problem := find_problem(Path(module)):
        sys.exit(
            f"drivetrain: {Path(module).name} {problem}: {compiler} links libstdc++ statically. torch uses the shared "
            "library, and in one process with it the module would crash. Point CXX at a g++ that links the shared "
            "library, take -static-libstdc++ out of CXXFLAGS and LDFLAGS, and check that the linker finds "
            "libstdc++.so.6 (LDFLAGS=-L...)."
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
