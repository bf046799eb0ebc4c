"""Stands in for libraries that write files by themselves, and saves tensors that have no values."""

import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from ..after_import import call_after_imports
from .shadow import Shadow, rebind

# Functions and methods of native code that open a file by its name: module, name, position of the file, its argument.
_NATIVE_WRITERS = (
    ("torch.jit", "ScriptModule.save", 1, "f"),
    ("torch.autograd.profiler", "profile.export_chrome_trace", 1, "path"),
    *(("torchvision.io", name, 1, "filename") for name in ("write_png", "write_jpeg")),
    ("torchvision.io", "write_file", 0, "filename"),
    ("torchaudio", "save", 0, "uri"),
    ("soundfile", "write", 0, "file"),
    ("cv2", "imwrite", 0, "filename"),
    ("cv2", "VideoWriter", 0, "filename"),
    ("pyarrow.parquet", "write_table", 1, "where"),
    ("pyarrow.parquet", "ParquetWriter", 0, "where"),
    ("safetensors.numpy", "save_file", 1, "filename"),
    ("lmdb", "open", 0, "path"),
    ("numpy", "savetxt", 0, "fname"),
    ("sqlite3", "connect", 0, "database"),
    ("h5py", "File", 0, "name"),
    ("pyarrow", "memory_map", 0, "path"),  # by which datasets reads what it has written
    ("tokenizers", "Tokenizer.save", 1, "path"),
)
# Functions that read; NumPy's keep a built-in open.
_READERS = (
    *(("numpy", name, 0, "fname") for name in ("loadtxt", "genfromtxt")),
    ("torch", "load", 0, "f"),
    ("pyarrow", "input_stream", 0, "source"),
    ("pyarrow.parquet", "read_table", 0, "source"),
    ("tokenizers", "Tokenizer.from_file", 0, "path"),
)
_CHANGING = os.O_RDWR | os.O_CREAT


def begin(shadow: Shadow, others: Mapping[str, Callable[[ModuleType], None]]) -> None:
    """Lets libraries write where the shadow says, modules that are imported later included, until the process ends.

    `others` has functions to call with other modules, by name, once they are imported. One for drivetrain's
    checkpointer takes the place of the stand-in.
    """
    saver = _Saver(shadow)
    FakeTensor.__reduce_ex__ = saver.reduced()  # type: ignore[method-assign]
    torch.serialization.add_safe_globals([_made, nn.Parameter])
    functions: dict[Any, Any] = {
        torch.save: saver.save(torch.save),
        torch._C.PyTorchFileWriter: _by(shadow.place, torch._C.PyTorchFileWriter),
        torch._C.PyTorchFileReader: _by(shadow.read_place, torch._C.PyTorchFileReader),
        torch.from_file: _mapped(shadow, torch.from_file),
    }
    by_module = {name: [function] for name, function in others.items()}
    for functions_of in (_NATIVE_WRITERS, _READERS):
        reads = functions_of is _READERS
        for module, name, position, argument in functions_of:
            redirect = functools.partial(_redirect, shadow, name, position, argument, reads)
            by_module.setdefault(module, []).append(redirect)
    by_module["safetensors.torch"] = [saver.stand_in_for_safetensors]
    by_module["wandb"] = [_disable_wandb]
    by_module["typeshed_client"] = [_search_own_path]
    by_module.setdefault("drivetrain.checkpointing.checkpointer", [saver.stand_in_for_checkpointer])
    by_module["numpy"].append(functools.partial(_map_copies, shadow))
    os.environ.update(WANDB_MODE="disabled", HF_HUB_OFFLINE="1")
    # TensorBoard then writes by Python, also where TensorFlow is installed.
    sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))
    rebind(functions)
    call_after_imports(by_module)


class _Saver:
    """Saves tensors without values by their layout, so that files stay small and can be loaded again."""

    def __init__(self, shadow: Shadow) -> None:
        self._shadow = shadow
        self._local = threading.local()

    def reduced(self) -> Callable[..., Any]:
        """Returns the method by which tensors without values are pickled."""

        def reduce(tensor: FakeTensor, _: int = 2) -> Any:
            storage = tensor.untyped_storage()
            self._sizes()[id(storage)] = storage.nbytes()
            layout = tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype
            return _made, (*layout, tensor.requires_grad, isinstance(tensor, nn.Parameter))

        return reduce

    def _sizes(self) -> dict[int, int]:
        """Returns the bytes of the storages that this thread has saved, by id."""
        if not hasattr(self._local, "sizes"):
            self._local.sizes = {}
        return self._local.sizes  # type: ignore[no-any-return]

    def _noted(self, file: Any, write: Callable[[Any], Any]) -> Any:
        """Writes to a file by its name or as an object, and notes the bytes that it would have had."""
        self._sizes().clear()
        is_name = isinstance(file, (str, os.PathLike))
        result = write(self._shadow.place(file) if is_name else file)
        name = file if is_name else getattr(file, "name", None)
        if isinstance(name, (str, os.PathLike)):
            self._shadow.note_bytes(os.fspath(name), sum(self._sizes().values()))
        return result

    def save(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def save(obj: object, f: Any, *args: Any, **kwargs: Any) -> Any:
            return self._noted(f, lambda file: plain(obj, file, *args, **kwargs))

        return save

    def stand_in_for_safetensors(self, module: ModuleType) -> None:
        """Writes files of safetensors with a hole for each tensor without values, so that they stay small."""
        names = {dtype: name for name, dtype in vars(module)["_TYPES"].items()}

        def save_file(tensors: dict[str, Tensor], filename: Any, metadata: dict[str, str] | None = None) -> None:
            header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
            end = 0
            for name, tensor in tensors.items():
                begin, end = end, end + tensor.numel() * tensor.element_size()
                header[name] = {"dtype": names[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [begin, end]}
            text = json.dumps(header).encode()
            with _disable_current_modes(), Path(filename).open("wb") as file:
                file.write(len(text).to_bytes(8, "little") + text)
                for name, tensor in tensors.items():
                    file.seek(8 + len(text) + header[name]["data_offsets"][0])
                    if not isinstance(tensor, FakeTensor):
                        file.write(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
                file.truncate(8 + len(text) + end)

        import safetensors

        reader = _by(self._shadow.read_place, safetensors.safe_open)
        rebind({module.save_file: save_file, safetensors.safe_open: reader})

    def stand_in_for_checkpointer(self, module: ModuleType) -> None:
        """Lets drivetrain's Checkpointer count steps, because its native code reads and writes memory with values.

        It restores nothing, and its first step shows what a save would write.
        """

        def enter(checkpointer: Any) -> Any:
            checkpointer._saver, checkpointer._entered_at = object(), time.monotonic()
            checkpointer._position.open()
            return checkpointer

        def leave(checkpointer: Any, *_: object) -> bool:
            checkpointer._saver = None
            checkpointer._position.close()
            checkpointer._notices.close()
            return False

        def step(checkpointer: Any) -> None:
            checkpointer._open_saver()
            checkpointer._position.stepped()
            checkpointer._steps += 1
            if checkpointer._steps == 1:
                checkpointer.save()

        def save(checkpointer: Any) -> Any:
            checkpointer._open_saver()
            state, path = checkpointer._state, Path(checkpointer._home) / f"step-{checkpointer._steps:010}"
            path.mkdir(parents=True, exist_ok=True)
            tensors = [state.model.state_dict(), [optimizer.state_dict() for optimizer in state.optimizers]]
            self._noted(path / "rank0.safetensors", lambda file: torch.serialization.save(tensors, file))
            return SimpleNamespace(path=path, step=checkpointer._steps)

        for name, function in {"__enter__": enter, "__exit__": leave, "step": step, "save": save}.items():
            setattr(module.Checkpointer, name, function)


def _made(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, requires_grad: bool, is_parameter: bool
) -> Tensor:
    """Makes a tensor that was saved without values."""
    with torch.no_grad():
        tensor = torch.empty_strided(shape, stride, dtype=dtype)
        if not isinstance(tensor, FakeTensor):
            tensor.zero_()
    return nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


# ---- Files that native code opens by their names.


def _redirect(shadow: Shadow, name: str, position: int, argument: str, reads: bool, module: ModuleType) -> None:
    """Replaces a function, class or method of a module by one that gets the shadow's file."""
    holder, _, last = name.rpartition(".")
    owner = getattr(module, holder) if holder else module
    plain = getattr(owner, last, None)
    if plain is None:
        return
    if isinstance(plain, type):  # a class stays one: its constructor gets the other file
        owner, last, position, plain = plain, "__init__", position + 1, plain.__init__  # type: ignore[misc]

    @functools.wraps(plain)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        given = args[position] if len(args) > position else kwargs.get(argument)
        if _is_file_name(given):
            mode = kwargs.get("mode", args[position + 1] if len(args) > position + 1 else "r")
            only_reads = reads or (name in ("File", "memory_map") and mode == "r")
            place = shadow.read_place(given) if only_reads else shadow.place(given, _CHANGING)
            if len(args) > position:
                args = (*args[:position], place, *args[position + 1 :])
            else:
                kwargs[argument] = place
        return plain(*args, **kwargs)

    if isinstance(owner, type):
        setattr(owner, last, redirected)
    else:
        rebind({plain: redirected})


def _is_file_name(value: object) -> TypeGuard[str | os.PathLike[str]]:
    return isinstance(value, (str, os.PathLike)) and not str(value).startswith(("file:", ":memory:"))


def _by(place: Callable[[Any], str], plain: Callable[..., Any]) -> Callable[..., Any]:
    return lambda file, *args, **kwargs: plain(place(file) if _is_file_name(file) else file, *args, **kwargs)


def _mapped(shadow: Shadow, plain: Callable[..., Any]) -> Callable[..., Any]:
    def from_file(filename: str, shared: bool | None = None, *args: Any, **kwargs: Any) -> Any:
        place = shadow.place(filename, _CHANGING) if shared else shadow.read_place(filename)
        return plain(place, shared, *args, **kwargs)

    return from_file


def _map_copies(shadow: Shadow, numpy: Any) -> None:
    """Lets numpy.memmap change a copy in memory of a file that only the machine has, which may be large."""
    plain = numpy.memmap.__new__

    def new(kind: Any, filename: Any, dtype: Any = numpy.uint8, mode: str = "r+", *args: Any, **kwargs: Any) -> Any:
        changes = mode in ("r+", "readwrite") and _is_file_name(filename)
        if changes and not shadow.overlay.is_inside(shadow.read_place(filename)):
            mode = "c"
        return plain(kind, filename, dtype, mode, *args, **kwargs)

    numpy.memmap.__new__ = new


def _disable_wandb(wandb: Any) -> None:
    """Switches W&B to its own mode that neither writes nor connects."""
    plain = wandb.init
    wandb.init = lambda *args, **kwargs: plain(*args, **{**kwargs, "mode": "disabled"})


def _search_own_path(client: Any) -> None:
    """Lets typeshed_client, by which LightningCLI reads signatures, ask this process and no program for sys.path."""
    plain = client.get_search_context
    client.get_search_context = lambda **given: plain(**{"search_path": [Path(each) for each in sys.path], **given})
