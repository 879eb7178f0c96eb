"""Page-locked host memory from a pool, for copies to and from accelerators.

    import pinpool

    pool = pinpool.Pool("cuda:0", 1 << 30)
    buffer = pool.checkout(1 << 20)
    memoryview(buffer)[:5] = b"hello"
    copy_async(device_memory, buffer.address, len(buffer), stream)  # any library's
    buffer.hold(stream)  # the pool gets the memory when the copy is complete, not before
    del buffer
"""

from ._native import Buffer as Buffer
from ._native import Device as Device
from ._native import Pool as Pool
from ._native import Region as Region
from ._native import __version__ as __version__
from .errors import *  # noqa: F403
