"""Checkpoints in the safetensors format: a file, an index or a folder.

    from pinpool.safetensors import load_file, safe_open

    tensors = load_file("model.safetensors", device="cuda")

    with safe_open("model.safetensors", framework="pt", device="cuda:0") as checkpoint:
        for name, tensor in checkpoint.prefetch():
            ...  # as soon as it has landed, while those behind it are copied

The names and arguments are those of safetensors 0.8 and 0.9. On a GPU tensors are views of blocks
of torch's own memory. A copy begins after what torch's current stream was given before, and a
tensor that was handed out is complete: any stream may use it.

Loads of a device share one pool of 256 MiB, which stays pinned until the process ends, so that the
next load need not pin again. With an argument `pool` they use that one.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from ._native import Checkpoint, Copier, Load, Pool, Window
from .errors import ArgumentError, UnsupportedError

__all__ = ["PrefetchLoader", "TensorMeta", "load_file", "safe_open", "weights"]

_Path = str | os.PathLike[str]

# What torch and numpy call the format's types. The types of 6 bits have no name there.
_TYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "BF16": "bfloat16",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn_x2",
}

# What the pool that loads share may pin.
_POOL = 256 << 20
# The device memory that a load has beside what the program took, in windows of so many bytes: the
# one that it takes from, and those ahead. Long ones keep the link busier.
_WINDOW = 1 << 30
_AHEAD = 1


def _type(module: Any, name: str) -> Any:
    """A type of torch's or numpy's."""
    found = getattr(module, _TYPES.get(name, ""), None)
    if found is None:
        raise UnsupportedError(f"{module.__name__} has no type {name}: name the tensors to load")
    return found


class TensorMeta(NamedTuple):
    """What the header says of a tensor."""

    dtype: str
    """The format's name, such as "BF16"."""
    shape: list[int]
    data_offsets: tuple[int, int]
    """Where its bytes start and end, counted from behind the header."""


class _Part(NamedTuple):
    """A tensor that is to be loaded, or some of its rows."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]
    file: str
    start: int
    """Where it starts in the file."""
    rows: tuple[int, int] | None = None

    @staticmethod
    def of(checkpoint: Checkpoint, name: str, rows: slice | None = None) -> _Part:
        found = checkpoint.describe(name)
        if found is None:
            raise ArgumentError(f"the checkpoint has no tensor {name!r}")
        part = _Part(*found)
        if rows is None:
            return part
        if not part.shape or rows.step not in (None, 1):
            raise ArgumentError(
                f"{rows} of tensor {name!r}: rows are a slice of step 1 of the first dimension"
            )
        first, *others = part.shape
        start, stop, _ = rows.indices(first)
        stop = max(start, stop)
        before, end = (part.nbytes * row // max(first, 1) for row in (start, stop))
        offset, shape = part.data_offsets[0], [stop - start, *others]
        offsets = offset + before, offset + end
        return _Part(part.dtype, shape, offsets, part.file, part.start + before, (start, stop))

    @property
    def nbytes(self) -> int:
        return self.data_offsets[1] - self.data_offsets[0]

    def tensor(self, module: Any, flat: Any) -> Any:
        """Its bytes as a tensor."""
        *others, last = self.shape or [1]
        # An element of torch's type has two.
        shape = [*others, last // 2] if self.dtype == "F4" else self.shape
        return flat.view(_type(module, self.dtype)).reshape(shape)


class _Host:
    """Tensors of torch or arrays of numpy in host memory: views of a private map of the file, whose
    pages are read when they are first used."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self._maps: dict[str, mmap.mmap] = {}

    def tensor(self, checkpoint: Checkpoint, name: str, part: _Part) -> Any:
        module, nbytes = self.module, part.nbytes
        if nbytes == 0:
            return part.tensor(module, module.empty(0, dtype=module.uint8))
        if part.file not in self._maps:
            # What has the file's path by now may be another file.
            opened = checkpoint.fileno(name)
            assert opened is not None
            self._maps[part.file] = mmap.mmap(opened, 0, access=mmap.ACCESS_COPY)
        mapped = self._maps[part.file]
        flat = module.frombuffer(mapped, dtype=module.uint8, count=nbytes, offset=part.start)
        return part.tensor(module, flat)


_making = threading.Lock()


def _shared(name: str) -> Copier:
    with _making:
        return _made(name)


@functools.cache
def _made(name: str) -> Copier:
    # The kernel copies some 4 GB a second from the page cache on each.
    threads = min(len(os.sched_getaffinity(0)), 16)
    return Copier(Pool(name, _POOL), _POOL, threads)


class _Gpu:
    """Tensors of torch on a GPU."""

    def __init__(self, torch: Any, device: str, pool: Pool | None) -> None:
        self.module, self.device, self._pool = torch, torch.device(device), pool
        if self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())

    @functools.cached_property
    def copier(self) -> Copier:
        """Made for the first load: nothing is pinned to read headers."""
        name = f"cuda:{self.device.index}"
        copier = Copier(self._pool) if self._pool else _shared(name)
        if copier.device != name:
            raise ArgumentError(f"the pool is of {copier.device}, and tensors are to go to {name}")
        return copier

    def start(self, window: Window, least: int) -> tuple[Load, Any]:
        """Starts a load, and gives it with the block where it goes, of `least` bytes or more."""
        torch, size = self.module, max(window.nbytes, least)
        block = torch.empty(size, dtype=torch.uint8, device=self.device)
        # torch may hand out memory that this stream still uses.
        stream = torch.cuda.current_stream(self.device).cuda_stream
        return window.load(self.copier, block.data_ptr(), block, stream), block


def _place(framework: str, device: Any, pool: Pool | None) -> _Host | _Gpu:
    """Where tensors go. "host" has numpy's arrays whatever the framework."""
    device = f"cuda:{device}" if isinstance(device, int) else str(device)
    if device == "host" or (framework in ("np", "numpy") and device == "cpu"):
        import numpy

        return _Host(numpy)
    if framework not in ("pt", "torch", "pytorch"):
        raise ArgumentError(
            f'no tensors are known for the framework "{framework}" on "{device}"; '
            'give "pt", or "np" on "cpu"'
        )
    if device != "cpu" and not re.fullmatch(r"cuda(:\d+)?", device):
        raise ArgumentError(
            f'no tensors are known for the device "{device}"; give "cpu", "cuda" or "cuda:N"'
        )
    import torch  # type: ignore[import-not-found, unused-ignore]

    return _Host(torch) if device == "cpu" else _Gpu(torch, device, pool)


class PrefetchLoader:
    """Tensors of a checkpoint that are being loaded to a GPU in the background. Each is handed out
    once, by `take` or by iterating. Any thread may use it.

    Tensors are loaded in windows, each of one block of torch's memory, which is freed when all
    tensors in it are gone. Behind the one that the program takes from, `ahead` more are loaded, one
    less while the program may still have the last tensor of the window before: beside what the
    program keeps there are at most `ahead + 1`. A tensor that is asked for far out of the order, or
    when its window was given up for later ones, is loaded by itself.

    A block is one of the stream that was current where it was started: a tensor that is used on
    another stream needs `record_stream`, as every tensor of torch does.
    """

    def __init__(
        self,
        gpu: _Gpu,
        checkpoint: Checkpoint,
        plan: dict[str, _Part],
        window: int = _WINDOW,
        ahead: int = _AHEAD,
        *,
        equal: bool = False,
    ) -> None:
        """equal: blocks of the same length, so that torch can use each again for the next."""
        if window < 1 or ahead < 1:
            raise ArgumentError(
                f"a window of {window} bytes, {ahead} ahead: give at least 1 for both"
            )
        # Refused before anything is copied.
        for dtype in {part.dtype for part in plan.values()}:
            _type(gpu.module, dtype)
        self._gpu, self._checkpoint, self._plan, self._ahead = gpu, checkpoint, plan, ahead
        self._windows = checkpoint.windows([(name, plan[name].rows) for name in plan], window)
        self._least = window if equal and len(self._windows) > 1 else 0
        names = [each.names() for each in self._windows]
        self._home = {name: number for number, of in enumerate(names) for name in of}
        self._lock = threading.Lock()
        # What nobody has taken: the names, their order, and how many are left in each window.
        self._left, self._order = set(plan), deque(plan)
        self._sizes = [len(of) for of in names]
        self._counts = list(self._sizes)
        # The loads under way, by window, and the next window to load.
        self._open: dict[int, tuple[Load, Any]] = {}
        self._next = 0
        self._closed = False
        self._start(ahead + 1)

    def _start(self, most: int) -> None:
        """Starts the next windows until so many are open."""
        while len(self._open) < most and self._next < len(self._windows):
            if self._counts[self._next] > 0:
                window = self._windows[self._next]
                self._open[self._next] = self._gpu.start(window, self._least)
            self._next += 1

    def _find(self, name: str) -> tuple[Load, Any]:
        """The load of a tensor that nobody has taken, and its block. Starts those behind it."""
        number = self._home[name]
        if number == self._next:
            if len(self._open) > self._ahead:
                del self._open[min(self._open)]
            self._start(len(self._open) + 1)
        if number not in self._open:
            [alone] = self._checkpoint.windows([(name, self._plan[name].rows)], 1)
            return self._gpu.start(alone, 0)
        # A load ends with the last thread that still waits for a tensor of it.
        for passed in [other for other in self._open if other < number - 1]:
            del self._open[passed]
        # Of the window before, the program may still have the last tensor, and with it the block,
        # until it asks for the second one of this.
        is_first = self._counts[number] == self._sizes[number]
        self._start(self._ahead if is_first else self._ahead + 1)
        return self._open[number]

    def _claim(self, name: str | None) -> tuple[str, Load, Any] | None:
        """Takes a name, or the first in the order, with its load."""
        with self._lock:
            if self._closed:
                raise ArgumentError("the loader is closed; open another one")
            if name is None:
                while self._order and self._order[0] not in self._left:
                    self._order.popleft()
                if not self._order:
                    return None
                name = self._order[0]
            elif name not in self._left:
                why = "was taken" if name in self._plan else "is not in the plan"
                raise ArgumentError(f"the tensor {name!r} {why}")
            load, block = self._find(name)
            self._left.remove(name)
            number = self._home[name]
            self._counts[number] -= 1
            if self._counts[number] == 0:
                self._open.pop(number, None)
            return name, load, block

    def _wait(self, name: str, load: Load, block: Any) -> Any:
        """Waits for what was claimed."""
        try:
            address = load.take(name)
        except BaseException:
            with self._lock:
                self._left.add(name)
                self._order.appendleft(name)
                self._counts[self._home[name]] += 1
            raise
        if address is None:
            raise ArgumentError("the loader was closed meanwhile")
        part = self._plan[name]
        start = address - block.data_ptr() if address else 0
        return part.tensor(self._gpu.module, block[start : start + part.nbytes])

    def _pair(self) -> tuple[str, Any] | None:
        claimed = self._claim(None)
        return None if claimed is None else (claimed[0], self._wait(*claimed))

    def names(self) -> list[str]:
        """The names that are handed out, in the order of the load."""
        return list(self._plan)

    def __len__(self) -> int:
        return len(self._plan)

    def take(self, name: str) -> Any:
        """Waits for a tensor, and hands it out. After an error it may be taken again."""
        claimed = self._claim(name)
        assert claimed is not None
        return self._wait(*claimed)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """The tensors that are left, each as soon as it has landed."""
        # No frame keeps what was handed out last.
        return iter(self._pair, None)

    def close(self) -> None:
        """Ends the load: what was not taken is given back. What was stays."""
        with self._lock:
            self._closed = True
            for load, _ in self._open.values():
                load.close()
            self._open.clear()

    def __enter__(self) -> PrefetchLoader:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()


class _Slice:
    """A tensor of which parts are loaded by indexing."""

    def __init__(self, opened: safe_open, name: str) -> None:
        self._opened, self._name = opened, name
        self._part = _Part.of(opened._checkpoint, name)

    def get_shape(self) -> list[int]:
        return list(self._part.shape)

    def get_dtype(self) -> str:
        return self._part.dtype

    def __getitem__(self, index: Any) -> Any:
        """As of a tensor. Of a range of rows, or of one row, no other bytes are read."""
        first, *others = (index if isinstance(index, tuple) else (index,)) or (Ellipsis,)
        rows = None
        if self._part.shape and self._part.dtype != "F4":
            count = self._part.shape[0]
            if isinstance(first, slice) and first.step in (None, 1):
                rows, first = first, slice(None)
            elif isinstance(first, int) and not isinstance(first, bool):
                row = first + count if first < 0 else first
                if not 0 <= row < count:
                    raise IndexError(f"row {first} of tensor {self._name!r}, which has {count}")
                rows, first = slice(row, row + 1), 0
        tensor = self._opened._get(self._name, rows)
        if not others and (first is Ellipsis or isinstance(first, slice) and rows):
            return tensor
        part = tensor[(first, *others)]
        # A view would keep the whole on the GPU.
        return part.clone() if isinstance(self._opened._to, _Gpu) else part


class safe_open:
    """A checkpoint of which tensors are loaded by name, as by safetensors' class of the same name
    and arguments. The path may be a file, an index, or a folder.

    framework: "pt" for tensors of torch, "np" for arrays of numpy. device: "cpu", where tensors are
    views of the mapped file; "cuda", "cuda:N" or N. pool: the pool of that GPU through which copies
    go, unless it is to be the shared one. backend is there for programs that give it, and ignored.
    """

    def __init__(
        self,
        filename: _Path,
        framework: str = "pt",
        device: Any = "cpu",
        *,
        backend: str = "mmap",
        pool: Pool | None = None,
    ) -> None:
        self._checkpoint = Checkpoint(filename)
        self._framework, self._pool = framework, pool
        self._to = _place(framework, device, pool)

    def keys(self) -> list[str]:
        """The names, sorted."""
        return sorted(self._checkpoint.names())

    def offset_keys(self) -> list[str]:
        """The names, in the order in which the tensors lie in the files."""
        return self._checkpoint.names()

    def metadata(self) -> dict[str, str] | None:
        """The metadata of all files together; None if no file has any."""
        texts = [json.loads(text) for text in self._checkpoint.metadata()]
        return {key: value for text in texts for key, value in text.items()} if texts else None

    def get_tensor_meta(self, name: str) -> TensorMeta:
        """What the header says of a tensor."""
        part = _Part.of(self._checkpoint, name)
        return TensorMeta(part.dtype, part.shape, part.data_offsets)

    def _get(self, name: str, rows: slice | None = None) -> Any:
        part = _Part.of(self._checkpoint, name, rows)
        if isinstance(self._to, _Host):
            return self._to.tensor(self._checkpoint, name, part)
        return PrefetchLoader(self._to, self._checkpoint, {name: part}).take(name)

    def get_tensor(self, name: str) -> Any:
        """Loads one tensor. `prefetch` and `get_tensors` load many together."""
        return self._get(name)

    def get_tensors(self) -> dict[str, Any]:
        """All tensors by name, in the order of `offset_keys`."""
        if isinstance(self._to, _Host):
            return {name: self._get(name) for name in self.offset_keys()}
        with self.prefetch() as loader:
            return {name: tensor for name, tensor in loader}

    def get_slice(self, name: str) -> _Slice:
        """A tensor that is loaded by indexing it, only the rows that are asked for."""
        return _Slice(self, name)

    def prefetch(
        self,
        plan: dict[str, slice | None] | None = None,
        *,
        device: Any = None,
        threads: int = 8,
        window: int = _WINDOW,
        ahead: int = _AHEAD,
    ) -> PrefetchLoader:
        """Starts to load tensors to a GPU in the background.

        plan: the names to load, each with None, or with the rows that are wanted: a slice of step
        1. Unless given, all tensors. device: the GPU, the handle's unless given. window, ahead: the
        device memory that is used beside what was taken, (ahead + 1) windows of so many bytes, 2
        GiB unless given. threads is there for programs that give it, and ignored: all loads of a
        device share the threads that read.
        """
        to = self._to if device is None else _place(self._framework, device, self._pool)
        if isinstance(to, _Host):
            raise ArgumentError(
                'prefetch loads to a GPU: give framework "pt" and a device "cuda:N"'
            )
        names = self.offset_keys()
        wanted = dict.fromkeys(names) if plan is None else plan
        parts = {name: _Part.of(self._checkpoint, name, rows) for name, rows in wanted.items()}
        ordered = {name: parts[name] for name in names if name in parts}
        return PrefetchLoader(to, self._checkpoint, ordered, window, ahead)

    def __enter__(self) -> safe_open:
        return self

    def __exit__(self, *_raised: object) -> None:
        pass


def load_file(
    filename: _Path,
    device: Any = "cpu",
    *,
    framework: str = "pt",
    backend: str = "mmap",
    pool: Pool | None = None,
) -> dict[str, Any]:
    """All tensors of a checkpoint, by name. The arguments are those of `safe_open`."""
    return safe_open(filename, framework, device, backend=backend, pool=pool).get_tensors()


def weights(
    files: _Path | Iterable[_Path],
    device: Any = "cuda",
    *,
    keep: Callable[[str], bool] | None = None,
    window: int = _WINDOW,
    ahead: int = _AHEAD,
    pool: Pool | None = None,
) -> Iterator[tuple[str, Any]]:
    """The tensors of several files, one by one, for a program that copies each and drops it.

    It is a generator: nothing is opened before the first is asked for, and a loop that is broken
    off gives everything back. keep: which names are wanted, all unless given. The device memory
    beside tensors that the program keeps is at most (ahead + 1) windows of `window` bytes, or of a
    tensor that is larger. On "cpu" tensors are views of the mapped files; on "host" they are arrays
    of numpy.
    """
    checkpoint = Checkpoint(files if isinstance(files, (str, os.PathLike)) else list(files))
    plan = {
        name: _Part.of(checkpoint, name)
        for name in checkpoint.names()
        if keep is None or keep(name)
    }
    to = _place("pt", device, pool)
    if isinstance(to, _Host):
        for name, part in plan.items():
            yield name, to.tensor(checkpoint, name, part)
        return
    with PrefetchLoader(to, checkpoint, plan, window, ahead, equal=True) as loader:
        yield from loader
