from os import PathLike
from types import TracebackType
from typing import Any, final

__version__: str

def command(words: list[str]) -> int:
    """Used by `python -m pinpool`."""

@final
class Device:
    """An opened device: "cuda:0", "acl:0", "host", or "auto" for the first that is there."""

    def __new__(cls, name: str = "auto") -> Device: ...
    @property
    def name(self) -> str: ...

@final
class Region:
    """One region of a pool's memory, for a program that registers it elsewhere (RDMA)."""

    @property
    def id(self) -> int:
        """Its number in the pool, never used twice."""
    @property
    def address(self) -> int: ...
    @property
    def len(self) -> int: ...
    @property
    def pinned(self) -> int:
        """The bytes of it that are page-locked."""
    @property
    def node(self) -> int | None:
        """The NUMA node that its pages come from, where that is known."""

@final
class Pool:
    """A pool of page-locked memory for one device. Any thread may use it.

    Buffers that are out stay usable when the pool is closed or gone. As a context manager it is
    closed at the end, without a wait.
    """

    def __new__(
        cls,
        device: Device | str,
        capacity: int = 256 << 20,
        *,
        initial: int | None = None,
        allow_unpinned: bool = False,
        name: str | None = None,
    ) -> Pool:
        """capacity: the bytes that the pool may pin. initial: the bytes to start with, an eighth
        of the capacity unless given, between 256 MiB and 1 GiB. allow_unpinned: go on with
        memory that is not page-locked where the system refuses; else that is an error. name: for
        statistics; unless given, a number."""
    def checkout(self, nbytes: int, timeout: float | None = None, *, zeroed: bool = True) -> Buffer:
        """A buffer of this length. Waits until the pool has one, for at most `timeout` seconds
        (None: for ever; 0: not at all). Other threads run meanwhile, and Ctrl-C ends the wait.

        Its bytes are zero. They are zeroed when the buffer is first viewed or its address asked
        for, and not otherwise; with zeroed=False not at all: then it has what an earlier buffer
        left there, as `numpy.empty` has.

        Raises ExhaustedError if it may not wait, and TimeoutError, ArgumentError or ClosedError."""
    def stats(self) -> dict[str, int]:
        """Bytes by state, and counts. `exhausted` also counts the tries of requests that waited
        afterwards."""
    def regions(self) -> list[Region]: ...
    def trim(self, keep: int = 0) -> int:
        """Unpins regions that no buffer uses, but for `keep` bytes; returns how many bytes."""
    @property
    def name(self) -> str: ...
    @property
    def capacity(self) -> int: ...
    def close(self, timeout: float | None = 0.0) -> bool:
        """Ends the pool: checkouts raise ClosedError, and free memory is unpinned. Waits for
        buffers that are out, for at most `timeout` seconds (None: for ever); returns whether all
        have come back. May be called again."""
    def __enter__(self) -> Pool: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...

@final
class Buffer:
    """Pinned memory, which the CPU may use or a stream, and never both.

    memoryview(buffer), numpy.frombuffer(buffer, ...) and from_dlpack(buffer) of numpy and torch are
    views of this very memory. While there is one, the memory does not go back, even if the buffer
    itself is deleted. A buffer that is deleted goes back to the pool: at once, or when the streams
    that it is held for are done with it.
    """

    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    @property
    def capacity(self) -> int:
        """The length that was asked for."""
    @property
    def address(self) -> int:
        """Where the memory starts, for libraries that copy. They may use it only while the
        buffer exists and is not released, or in the order of a stream that it is held for."""
    @property
    def pinned(self) -> bool:
        """Whether the memory is page-locked: always, unless the pool allows unpinned memory."""
    @property
    def ready(self) -> bool:
        """Whether the CPU may use the buffer: no stream that it was held for may still use it.
        Does not wait."""
    def resize(self, nbytes: int) -> None:
        """Sets the length of views, up to the capacity. The bytes stay as they are. Raises
        StateError if there is a view."""
    def hold(self, stream: int) -> None:
        """Keeps the memory until everything queued on a stream by now is complete: to be called
        after the copy is queued, for each stream. The stream is a raw handle (`CUstream`,
        `torch.cuda.Stream.cuda_stream`) of the pool's device, and exists until its work is
        complete. If it is being captured, the graph keeps the memory.

        From here on the CPU may not use the buffer: new views are refused until wait() has
        returned or `ready` is true. With views that exist already it raises StateError, and
        holds the memory all the same. After any other error nothing more is held than before:
        synchronise the stream before the buffer is deleted."""
    def wait(self, timeout: float | None = None) -> None:
        """Waits until no stream that the buffer was held for may use it. Other threads run
        meanwhile, and Ctrl-C ends the wait. Raises TimeoutError after `timeout` seconds, and
        DeviceLostError if it can never be known."""
    def release(self) -> None:
        """Gives the memory back, as deleting the buffer does. Raises StateError if there is a
        view."""
    def __enter__(self) -> Buffer: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...

@final
class Copier:
    """Used by `pinpool.safetensors`."""

    def __new__(
        cls, pool: Pool, share: int | None = None, threads: int | None = None
    ) -> Copier: ...
    @property
    def device(self) -> str: ...

@final
class Checkpoint:
    """Used by `pinpool.safetensors`."""

    def __new__(cls, path: str | PathLike[str] | list[str | PathLike[str]]) -> Checkpoint: ...
    def names(self) -> list[str]: ...
    def metadata(self) -> list[str]: ...
    def describe(self, name: str) -> tuple[str, list[int], tuple[int, int], str, int] | None: ...
    def fileno(self, name: str) -> int | None: ...
    def windows(
        self, plan: list[tuple[str, tuple[int, int] | None]], bytes: int
    ) -> list[Window]: ...

@final
class Window:
    """Used by `pinpool.safetensors`."""

    def names(self) -> list[str]: ...
    @property
    def nbytes(self) -> int: ...
    def load(self, copier: Copier, address: int, owner: object, behind: int) -> Load: ...

@final
class Load:
    """Used by `pinpool.safetensors`."""

    def take(self, name: str) -> int | None: ...
    def close(self) -> None: ...
