"""Compiles the shim, `shim.cpp`, with torch's headers. It needs g++ and nothing else.

    python3 build.py torch/include torch_2_11.so

torch's C++ interface changes with its minor versions, so that each needs a shim of its own.
`.ci/torch` puts some into the wheel, and `pinpool.torch.install` compiles the others.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

FOLDER = pathlib.Path(__file__).resolve().parent
COMPILER = os.environ.get("CXX", "g++")
FLAGS = ["-std=c++20", "-O2", "-shared", "-fPIC", "-s"]


def build(include: pathlib.Path, out: pathlib.Path) -> None:
    """Compiles it. The file is there when it is whole: several processes may do this at once."""
    with tempfile.TemporaryDirectory(dir=out.parent) as name:
        new = pathlib.Path(name)
        # Empty libraries with the names of torch's: the shim then needs these names, for which the
        # loader takes the libraries that torch has loaded, wherever they are.
        for library in ("libc10.so", "libtorch_cpu.so"):
            empty = ["-shared", "-nostdlib", f"-Wl,-soname,{library}", "-xc", os.devnull]
            _run(*empty, "-o", f"{new}/{library}")
        sources = [f"-I{FOLDER}", "-isystem", f"{include}", f"{FOLDER}/shim.cpp"]
        needed = ["-Wl,--no-as-needed", f"{new}/libc10.so", f"{new}/libtorch_cpu.so"]
        _run(*FLAGS, *sources, *needed, "-o", f"{new}/{out.name}")
        # Whatever the umask is: `pinpool.torch` loads nothing that others can write to.
        os.chmod(new / out.name, 0o755)
        os.replace(new / out.name, out)


def _run(*arguments: str) -> None:
    subprocess.run([COMPILER, *arguments], check=True, stderr=subprocess.PIPE, text=True)


if __name__ == "__main__":
    FLAGS += ["-Wall", "-Werror"]
    try:
        build(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
    except subprocess.CalledProcessError as error:
        sys.exit(error.stderr)
