"""Compiles the shim once for each version of torch, of the shim and of pinpool's header, into a cache folder.

torch's C++ interface changes with each minor version, so the shim is built where it runs: g++ and torch's own headers
are all that it needs.
"""

import hashlib
import os
import pathlib
import shutil
import subprocess

import torch

SOURCE = pathlib.Path(__file__).resolve().parent.parent / "shim.cpp"


def find(library=None):
    """The folders of libpinpool.so and of pinpool.h."""
    folder = library or os.environ.get("PINPOOL_LIBRARY")
    if folder:
        candidates = [(folder, folder), (folder, os.path.join(folder, "..", "include"))]
    else:
        candidates = [tuple(_pkg_config(what) for what in ("libdir", "includedir"))]
    for libdir, include in candidates:
        if libdir and os.path.exists(os.path.join(libdir, "libpinpool.so")):
            for headers in (include, os.path.join(include, "pinpool")):
                if os.path.exists(os.path.join(headers, "pinpool.h")):
                    return os.path.abspath(libdir), os.path.abspath(headers)
    raise RuntimeError(
        f"libpinpool.so and pinpool.h are not in {folder or 'what pkg-config names'}: build them with `cargo cinstall "
        "-p pinpool-capi`, or name their folder by install(library=...) or $PINPOOL_LIBRARY"
    )


def shim(libdir, include):
    """The path of the compiled shim."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise RuntimeError(f"the shim needs a C++ compiler and `{compiler}` is not there: install g++, or set $CXX")
    root = pathlib.Path(torch.__file__).resolve().parent
    if not (root / "include/ATen/core/CachingHostAllocator.h").exists():
        raise RuntimeError(f"torch's headers are not in {root}/include: install torch from its wheel")
    command = [
        compiler, "-std=c++20", "-O2", "-shared", "-fPIC", "-w",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        f"-I{include}", f"-I{root}/include", str(SOURCE),
        f"-L{root}/lib", f"-L{libdir}", "-lc10", "-ltorch_cpu", "-lpinpool",
        f"-Wl,-rpath,{libdir}", f"-Wl,-rpath,{root}/lib",
    ]
    key = hashlib.sha256()
    for part in (torch.__version__, " ".join(command)):
        key.update(part.encode())
    for file in (SOURCE, pathlib.Path(include) / "pinpool.h"):
        key.update(file.read_bytes())
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = pathlib.Path(base) / "pinpool_torch" / key.hexdigest()[:16]
    built = folder / "shim.so"
    if not built.exists():
        folder.mkdir(parents=True, exist_ok=True)
        # Several processes can be here at once: each one's file takes the name when it is whole.
        own = folder / f"shim.{os.getpid()}.so"
        done = subprocess.run([*command, "-o", str(own)], capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(
                f"the shim does not compile against torch {torch.__version__} with {compiler}:\n{done.stderr[-4000:]}"
            )
        os.replace(own, built)
    return str(built)


def _pkg_config(variable):
    if shutil.which("pkg-config") is None:
        return None
    done = subprocess.run(["pkg-config", f"--variable={variable}", "pinpool"], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None
