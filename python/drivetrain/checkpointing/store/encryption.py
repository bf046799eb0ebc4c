"""Encrypts and authenticates checkpoints with AES-256-GCM; the `cryptography` package is imported when used.

Every record, manifest and tensor file has a key of its own. HKDF-SHA256 (RFC 5869) derives it from the user's key, a
salt and the file's purpose. The salt has 128 random bits, which are drawn for each file of each save. A derived key
encrypts each chunk once, under the nonce that counts the chunks, so that no pair of key and nonce ever repeats.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import functools
import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .errors import EncryptionError
from .layout import CHUNK_BYTES
from .manifest import Protection

CIPHER = "AES-256-GCM"
TAG_BYTES = 16
_KEY_BYTES, _SALT_BYTES, _NONCE_BYTES = 32, 16, 12

KeySource: TypeAlias = Callable[[str | None], "tuple[str, bytes]"]


class Encryption:
    """Says which keys encrypt and decrypt checkpoints. Give one of the first three arguments.

    A text of keys has one key of 32 bytes per word, as base64 or hexadecimal; `#` begins a comment. The first key
    encrypts, and all decrypt. To rotate keys, put the new one first and keep the old ones as long as checkpoints need
    them. `openssl rand -base64 32` draws a key. The text is read again for each save.

    Args:
        key_file: A file with such a text, or with the 32 bytes of one key.
        key_env: The name of an environment variable with such a text.
        key: A callable, for example of a key management service. It is called with None to encrypt and returns an
            identifier and the key's 32 bytes. Called with an identifier, it returns the same pair to decrypt. The
            identifier is stored in the checkpoint; it may be a data key that the service has wrapped.
        accept_plain: Reads checkpoints that are not encrypted as well. Without it they raise an error, because anyone
            could have written them.

    Raises:
        ImportError: The package `cryptography` is not installed.
        ValueError: Not exactly one of `key_file`, `key_env` and `key` is given.
    """

    def __init__(
        self,
        *,
        key_file: str | os.PathLike[str] | None = None,
        key_env: str | None = None,
        key: KeySource | None = None,
        accept_plain: bool = False,
    ) -> None:
        given = [name for name, value in (("key_file", key_file), ("key_env", key_env), ("key", key)) if value]
        if len(given) != 1:
            raise ValueError(f"{' and '.join(given) or 'nothing'} is given, expected one of key_file, key_env and key")
        try:
            import cryptography  # noqa: F401
        except ImportError as error:
            raise ImportError(
                "encryption needs the package cryptography: pip install 'drivetrain[encryption]'"
            ) from error
        self.accept_plain = accept_plain
        self._source: KeySource = key or functools.partial(_from_text, key_file, key_env or "")
        self._known: dict[str, bytes] = {}  # a key management service may be slow, or charge for each call

    def current(self) -> tuple[str, bytes]:
        """Returns the identifier and the bytes of the key that encrypts now.

        Raises:
            EncryptionError: The source has no valid key; the message says why, without any part of a key.
        """
        return self._ask(None)

    def find(self, key_id: str) -> bytes:
        """Returns the key with this identifier. Raises EncryptionError if the source has no such key."""
        if key_id not in self._known:
            self._known[key_id] = self._ask(key_id)[1]
        return self._known[key_id]

    def new_cipher(self, file: str) -> FileCipher:
        """Returns the cipher of a new file, with the current key and a salt of its own."""
        key_id, key = self.current()
        return FileCipher(key, Protection(CIPHER, key_id, secrets.token_hex(_SALT_BYTES)), file)

    def cipher_of(self, protection: Protection, file: str) -> FileCipher:
        """Returns the cipher of a file that exists. Raises EncryptionError if a newer drivetrain has chosen another."""
        if protection.cipher != CIPHER:
            raise EncryptionError(f"{file} is encrypted with {protection.cipher}, expected {CIPHER}: update drivetrain")
        return FileCipher(self.find(protection.key_id), protection, file)

    def _ask(self, key_id: str | None) -> tuple[str, bytes]:
        what = "the current key" if key_id is None else f"the key {key_id!r}"
        try:
            name, value = self._source(key_id)
        except EncryptionError:
            raise
        except Exception as error:  # a service's client raises errors of its own
            raise EncryptionError(f"{what} was not found: {type(error).__name__}: {error}") from error
        if not isinstance(name, str) or not isinstance(value, bytes) or len(value) != _KEY_BYTES:
            raise EncryptionError(
                f"key returned a {type(name).__name__} and a {type(value).__name__} for {what}, expected the "
                f"identifier as a str and a key of {_KEY_BYTES} bytes"
            )
        return name, value


class FileCipher:
    """Encrypts and decrypts the record of one rank and the chunks of its tensor file, or the manifest.

    All keys derive from the user's key, `protection` and the name of the tensor file, or the manifest's name.
    """

    def __init__(self, key: bytes, protection: Protection, file: str) -> None:
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        def derived(kind: str) -> Any:
            salt, purpose = bytes.fromhex(protection.salt), f"drivetrain checkpoint {kind} {file}"
            return AESGCM(HKDF(hashes.SHA256(), _KEY_BYTES, salt, purpose.encode()).derive(key))

        self.protection, self._file = protection, file
        self._text, self._chunks = derived("text"), derived("chunks")

    def seal_text(self, secret: bytes, visible: bytes) -> bytes:
        """Encrypts `secret`, and authenticates it with `visible`. Call it once."""
        sealed: bytes = self._text.encrypt(bytes(_NONCE_BYTES), secret, visible)
        return sealed

    def unseal_text(self, sealed: bytes, visible: bytes) -> bytes:
        """Reverses `seal_text`. Raises ValueError if anything has changed, or the key is another one."""
        with _checked():
            secret: bytes = self._text.decrypt(bytes(_NONCE_BYTES), sealed, visible)
        return secret

    def seal_chunk(self, checkpoint: str, index: int, file_bytes: int, chunk: Tensor, sealed: Tensor) -> str:
        """Encrypts a chunk once, and authenticates its place. Returns the tag in hexadecimal digits.

        Args:
            checkpoint: The identifier of the checkpoint.
            index: The index of the chunk in its file.
            file_bytes: The size of the file.
            chunk: Its bytes, uint8, shape (n,).
            sealed: Receives the encrypted bytes and the tag, uint8, shape (m,) with m >= n + 16.
        """
        end, place = chunk.numel() + TAG_BYTES, self._place(checkpoint, index, file_bytes)
        self._chunks.encrypt_into(_nonce(index), _memory(chunk), place, _memory(sealed[:end]))
        return bytes(_memory(sealed[end - TAG_BYTES : end])).hex()

    def unseal_chunk(self, checkpoint: str, index: int, file_bytes: int, sealed: Tensor, tag: str) -> Tensor:
        """Returns the bytes of a chunk, uint8, shape (n,), from encrypted ones with room for a tag, shape (n + 16,)."""
        chunk = torch.empty(sealed.numel() - TAG_BYTES, dtype=torch.uint8, device="cpu")
        _memory(sealed)[-TAG_BYTES:] = bytes.fromhex(tag)
        with _checked():
            place = self._place(checkpoint, index, file_bytes)
            self._chunks.decrypt_into(_nonce(index), _memory(sealed), place, _memory(chunk))
        return chunk

    def _place(self, checkpoint: str, index: int, file_bytes: int) -> bytes:
        """Returns a text that no other chunk has."""
        return f"{checkpoint} {self._file} chunk {index} of {CHUNK_BYTES} in {file_bytes} bytes".encode()


@contextlib.contextmanager
def _checked() -> Iterator[None]:
    """Raises ValueError in place of the error of `cryptography`, which has no text."""
    from cryptography.exceptions import InvalidTag

    try:
        yield
    except InvalidTag:
        raise ValueError(
            "its authentication tag does not hold: its bytes were changed or moved, or another key encrypted them"
        ) from None


def _from_text(key_file: str | os.PathLike[str] | None, key_env: str, key_id: str | None) -> tuple[str, bytes]:
    """Returns a key of the text in a file or an environment variable; None asks for the first one."""
    where = f"the environment variable {key_env}" if key_file is None else f"key_file {os.fspath(key_file)}"
    try:
        text = os.environ[key_env].encode() if key_file is None else Path(key_file).read_bytes()
    except KeyError:
        raise EncryptionError(f"{where} is not set, expected a key in it") from None
    except OSError as error:
        raise EncryptionError(f"{where} cannot be read: {error.strerror}") from error
    words = [word for line in text.splitlines() for word in line.partition(b"#")[0].split()]
    found = [text] if len(text) == _KEY_BYTES else [_decoded(word) for word in words]
    for number, key in enumerate(found, 1):
        if len(key) != _KEY_BYTES:
            raise EncryptionError(
                f"{where} has {len(words[number - 1])} characters as key {number}, expected {_KEY_BYTES} bytes as "
                "base64 or hexadecimal digits: `openssl rand -base64 32` draws a key"
            )
    keys = {hashlib.sha256(b"drivetrain key\0" + key).hexdigest()[:16]: key for key in found}
    if not keys:
        raise EncryptionError(f"{where} is empty, expected a key of {_KEY_BYTES} bytes")
    if key_id is not None and key_id not in keys:
        raise EncryptionError(
            f"{where} has the keys {', '.join(keys)}, expected {key_id}, which encrypted the checkpoint: add that key "
            "after the first one"
        )
    name = key_id or next(iter(keys))
    return name, keys[name]


def _decoded(word: bytes) -> bytes:
    """Returns the bytes of a key; none if the word is no text of one."""
    try:
        return bytes.fromhex(word.decode()) if len(word) == 2 * _KEY_BYTES else base64.b64decode(word, validate=True)
    except ValueError:  # which base64 and UTF-8 derive their errors from
        return b""


def _nonce(index: int) -> bytes:
    return index.to_bytes(_NONCE_BYTES, "big")


def _memory(tensor: Tensor) -> memoryview:
    """Returns a buffer over the bytes of a contiguous CPU tensor, which must outlive it."""
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
