"""Encrypts and authenticates checkpoints with AES-256-GCM; the `cryptography` package is imported when used.

Every record, manifest and tensor file has a key of its own. HKDF-SHA256 (RFC 5869) derives it from the user's key, a
salt and the file's purpose. The salt has 128 random bits, which are drawn for each file of each save. A derived key
encrypts each chunk once, under the nonce that counts the chunks, so that no pair of key and nonce ever repeats.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import os
import secrets
from collections.abc import Callable
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
        if key is not None:
            self._source = key
        elif key_file is not None:
            self._source = _keys_of(f"key_file {os.fspath(key_file)}", lambda: _contents(key_file))
        elif key_env is not None:
            self._source = _keys_of(f"the environment variable {key_env}", lambda: _variable(key_env))
        self._known: dict[str, bytes] = {}  # a key management service may be slow, or charge for each call

    def current(self) -> tuple[str, bytes]:
        """Returns the identifier and the bytes of the key that encrypts now.

        Raises:
            EncryptionError: The source has no valid key; the message says why, without any part of a key.
        """
        return self._ask(None)

    def find(self, key_id: str) -> bytes:
        """Returns the key with this identifier.

        Raises:
            EncryptionError: The source has no such key.
        """
        if key_id not in self._known:
            self._known[key_id] = self._ask(key_id)[1]
        return self._known[key_id]

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
    """Encrypts and decrypts the texts and chunks of one rank's files, or the manifest.

    Args:
        key: The user's key, which the keys of the files derive from.
        protection: The salt, and the identifier of the key.
        file: Name of the tensor file that the chunks are of; for a manifest, the manifest's name.
    """

    def __init__(self, key: bytes, protection: Protection, file: str) -> None:
        self.protection = protection
        self._file = file
        self._text, self._chunks = (_derived(key, protection, f"{kind} {file}") for kind in ("text", "chunks"))

    @classmethod
    def new(cls, encryption: Encryption, file: str) -> FileCipher:
        """Draws a salt and takes the current key.

        Raises:
            EncryptionError: There is no current key.
        """
        key_id, key = encryption.current()
        return cls(key, Protection(CIPHER, key_id, secrets.token_hex(_SALT_BYTES)), file)

    @classmethod
    def of(cls, encryption: Encryption, protection: Protection, file: str) -> FileCipher:
        """Returns the cipher of files that exist.

        Raises:
            EncryptionError: The key is unknown, or a newer drivetrain has chosen another cipher.
        """
        if protection.cipher != CIPHER:
            raise EncryptionError(f"{file} is encrypted with {protection.cipher}, expected {CIPHER}: update drivetrain")
        return cls(encryption.find(protection.key_id), protection, file)

    def seal_text(self, secret: bytes, visible: bytes) -> bytes:
        """Encrypts `secret`, and authenticates it with `visible`. Call it once."""
        sealed: bytes = self._text.encrypt(bytes(_NONCE_BYTES), secret, visible)
        return sealed

    def unseal_text(self, sealed: bytes, visible: bytes) -> bytes:
        """Reverses `seal_text`.

        Raises:
            ValueError: Something has changed, or the key is another one.
        """
        from cryptography.exceptions import InvalidTag

        try:
            secret: bytes = self._text.decrypt(bytes(_NONCE_BYTES), sealed, visible)
        except InvalidTag:
            raise ValueError(_CHANGED) from None
        return secret

    def seal_chunk(self, index: int, place: bytes, chunk: Tensor, sealed: Tensor) -> str:
        """Encrypts a chunk once.

        Args:
            index: The index of the chunk in its file.
            place: The text of `place`, which is authenticated with the chunk.
            chunk: Its bytes, uint8, shape (n,).
            sealed: Receives the encrypted bytes and the tag, uint8, shape (m,) with m >= n + 16.

        Returns:
            The tag in hexadecimal digits.
        """
        end = chunk.numel() + TAG_BYTES
        self._chunks.encrypt_into(_nonce(index), _memory(chunk), place, _memory(sealed[:end]))
        return bytes(_memory(sealed[end - TAG_BYTES : end])).hex()

    def unseal_chunk(self, index: int, place: bytes, sealed: Tensor, tag: str) -> Tensor:
        """Returns the bytes of a chunk, uint8, shape (n,).

        Args:
            index, place: As for `seal_chunk`.
            sealed: The encrypted bytes with room for the tag, uint8, shape (n + 16,).
            tag: The tag in hexadecimal digits.

        Raises:
            ValueError: The chunk or its place has changed, or the key is another one.
        """
        from cryptography.exceptions import InvalidTag

        chunk = torch.empty(sealed.numel() - TAG_BYTES, dtype=torch.uint8, device="cpu")
        _memory(sealed)[-TAG_BYTES:] = bytes.fromhex(tag)
        try:
            self._chunks.decrypt_into(_nonce(index), _memory(sealed), place, _memory(chunk))
        except InvalidTag:
            raise ValueError(_CHANGED) from None
        return chunk

    def place(self, checkpoint: str, index: int, file_bytes: int) -> bytes:
        """Returns the text that no other chunk has.

        Args:
            checkpoint: The identifier of the checkpoint.
            index: The index of the chunk in its file.
            file_bytes: The size of the file.
        """
        return f"{checkpoint} {self._file} chunk {index} of {CHUNK_BYTES} in {file_bytes} bytes".encode()


_CHANGED = "its authentication tag does not hold: its bytes were changed or moved, or another key encrypted them"


def _keys_of(where: str, read: Callable[[], bytes]) -> KeySource:
    """Returns the source of the keys in a text, which `read` returns; `where` is its place, for messages."""

    def find(key_id: str | None) -> tuple[str, bytes]:
        keys = {hashlib.sha256(b"drivetrain key\0" + key).hexdigest()[:16]: key for key in _parsed(where, read())}
        if key_id is None:
            return next(iter(keys.items()))
        if key_id not in keys:
            raise EncryptionError(
                f"{where} has the keys {', '.join(keys)}, expected {key_id}, which encrypted the checkpoint: add "
                "that key after the first one"
            )
        return key_id, keys[key_id]

    return find


def _parsed(where: str, text: bytes) -> list[bytes]:
    words = [word for line in text.splitlines() for word in line.partition(b"#")[0].split()]
    keys = [text] if len(text) == _KEY_BYTES else [_decoded(word) for word in words]
    if not keys:
        raise EncryptionError(f"{where} is empty, expected a key of {_KEY_BYTES} bytes")
    for number, key in enumerate(keys, 1):
        if len(key) != _KEY_BYTES:
            raise EncryptionError(
                f"{where} has {len(words[number - 1])} characters as key {number}, expected {_KEY_BYTES} bytes as "
                "base64 or hexadecimal digits: `openssl rand -base64 32` draws a key"
            )
    return keys


def _decoded(word: bytes) -> bytes:
    """Returns the bytes of a key; none if the word is no text of one."""
    try:
        return bytes.fromhex(word.decode()) if len(word) == 2 * _KEY_BYTES else base64.b64decode(word, validate=True)
    except ValueError:  # which base64 and UTF-8 derive their errors from
        return b""


def _contents(path: str | os.PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise EncryptionError(f"key_file {os.fspath(path)} cannot be read: {error.strerror}") from error


def _variable(name: str) -> bytes:
    value = os.environ.get(name)
    if value is None:
        raise EncryptionError(f"the environment variable {name} is not set, expected a key in it")
    return value.encode()


def _derived(key: bytes, protection: Protection, purpose: str) -> Any:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    salt = bytes.fromhex(protection.salt)
    return AESGCM(HKDF(hashes.SHA256(), _KEY_BYTES, salt, f"drivetrain checkpoint {purpose}".encode()).derive(key))


def _nonce(index: int) -> bytes:
    return index.to_bytes(_NONCE_BYTES, "big")


def _memory(tensor: Tensor) -> memoryview:
    """Returns a buffer over the bytes of a contiguous CPU tensor, which must outlive it."""
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
