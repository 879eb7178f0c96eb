"""What the package raises. Each exception has the text of the library, with the cause and the
remedy."""

import builtins as _builtins


class Error(Exception):
    """Every error of the package is one of these."""


class ArgumentError(Error, ValueError):
    """The call cannot succeed as it was made: an argument, or a length that the pool can never
    serve."""


class UnsupportedError(Error):
    """This platform or device cannot do it."""


class UnavailableError(Error):
    """No device has this name, or its driver is missing."""


class StateError(Error, BufferError):
    """The buffer cannot do it now: it is viewed, held for a stream, waited for or released."""


class TransientError(Error):
    """The same call may succeed later."""


class ExhaustedError(TransientError, MemoryError):
    """The pool has no room now, or the system refuses memory or page locks."""


class TimeoutError(TransientError, _builtins.TimeoutError):
    """The time is over."""


class CaptureError(Error):
    """The stream is being captured into a graph."""


class ClosedError(Error):
    """The pool was closed."""


class ForkedError(Error, RuntimeError):
    """The process was forked from one that had opened a device, and can use none."""


class DeviceLostError(Error, RuntimeError):
    """The device cannot be used until the process ends."""


class InternalError(DeviceLostError):
    """A mistake of the library."""
