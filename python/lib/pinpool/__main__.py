"""python -m pinpool doctor | bench | load | top: the command `pinpool`, with the same options and exit
statuses. `doctor` also says which of the programs are here that pinpool serves."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import pathlib
import platform
import signal
import sys

from ._native import __version__, command

# A server with plugins: its package, their group, the variable that names those to load, and what
# pinpool's is for.
_SERVERS = (
    ("vllm", "vllm.general_plugins", "VLLM_PLUGINS", "--load-format pinpool"),
    ("sglang", "sglang.srt.plugins", "SGLANG_PLUGINS", "--load-format private"),
)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python() -> list[tuple[str, str]]:
    """What is here for pinpool to serve. Imports none of it: that takes seconds."""
    lines = [("python", f"{platform.python_version()}, pinpool {__version__}")]
    lines += [(name, _version(name) or "not installed") for name in ("torch", "safetensors")]
    shims = pathlib.Path(__file__).parent.glob("_shim/torch_*.so")
    built = sorted(shim.stem.removeprefix("torch_").replace("_", ".") for shim in shims)
    text = "in the wheel for torch " + ", ".join(built) if built else "not in the wheel"
    lines.append(("torch's hook", f"{text}; compiled at the first use for others"))
    for name, group, variable, use in _SERVERS:
        version = _version(name)
        named = os.environ.get(variable)
        if name == "sglang":
            named = named or None  # Empty, it names all.
        if version is None:
            text = "not installed"
        elif not importlib.metadata.entry_points(group=group, name="pinpool"):
            text = f"{version}; it does not see pinpool's plugin: install pinpool's wheel with pip"
        elif named is not None and "pinpool" not in named.split(","):
            text = f"{version}; {variable} leaves pinpool's plugin out: add pinpool to it"
        else:
            text = f"{version}; for {use}"
        lines.append((name, text))
    return lines


def main() -> int:
    words = sys.argv[1:]
    if "doctor" in words and not {"-h", "--help"} & set(words):
        # Before the command's own text, of which a JSON object is the last line. Like that text, it
        # is dropped if nobody reads it.
        text = "".join(f"{name:17} {text}\n" for name, text in _python())
        with contextlib.suppress(OSError):
            os.write(sys.stdout.fileno(), f"{text}\n".encode())
    # Ctrl-C ends the command as it ends other programs: Python's own handler would not run.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return command(["python -m pinpool", *words])


if __name__ == "__main__":
    sys.exit(main())
