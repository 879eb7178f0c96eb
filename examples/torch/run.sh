#!/usr/bin/env bash
# Tests and measurements of pinpool_torch on a machine with a GPU, torch, g++ and python3; no network and no Rust.
#
#   run.sh FOLDER        FOLDER has libpinpool.so and pinpool.h; the logs go to $OUT (here: ./out)
#
# Goes on after a part that fails or hangs, the parts that matter most first, and ends within four minutes. With
# TORCH_TESTS=path of torch's test_cuda.py its tests of pinned memory run last, on the pool (they need `expecttest`).
here=$(cd "$(dirname "$0")" && pwd)
export PINPOOL_LIBRARY=$(cd "${1:?the folder of libpinpool.so and pinpool.h}" && pwd) PYTHONUNBUFFERED=1
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH} XDG_CACHE_HOME=${XDG_CACHE_HOME:-$(mktemp -d)}
python=${PYTHON:-python3}
OUT=${OUT:-out}
mkdir -p "$OUT"
end=${SECONDS_IN_ALL:-230}

part() { # name, seconds, command
  local name=$1 limit=$2 left=$((end - SECONDS)) start=$SECONDS code
  shift 2
  [ "$left" -lt "$limit" ] && limit=$left
  [ "$limit" -lt 5 ] && { echo "$name: no time left" | tee -a "$OUT/summary.log"; return; }
  echo "== $name"
  timeout -k 5 "$limit" "$@" 2>&1 | tail -c 90000 | tee "$OUT/$name.log"
  code=${PIPESTATUS[0]}
  echo "$name: code $code, $((SECONDS - start)) s$([ "$code" = 124 ] && echo ", at its limit")" | tee -a "$OUT/summary.log"
}

: >"$OUT/summary.log"
part build 80 "$python" - <<'PY'
import shutil, subprocess, sys, time
import torch, pinpool_torch
print(sys.version, "torch", torch.__version__, torch.version.cuda, torch.cuda.is_available() and torch.cuda.get_device_name())
print(subprocess.run(["g++", "--version"], capture_output=True, text=True).stdout.splitlines()[:1])
start = time.perf_counter()
pinpool_torch.install(capacity=1 << 30)
print(f"the shim is compiled and installed, {time.perf_counter() - start:.1f} s")
x = torch.ones(1 << 20, pin_memory=True)
print("pinned:", x.is_pinned(), "the same on the device:", bool((x.to("cuda", non_blocking=True) == 1).all()))
print(pinpool_torch.stats())
PY
timeout 90 "$python" "$here/bench/bench.py" compile_loops >/dev/null 2>&1 & # beside the tests
part tests 100 "$python" "$here/tests/test_torch.py"
wait
part hook 40 "$python" "$here/bench/bench.py" hook
part server 45 "$python" "$here/bench/bench.py" server
part waste 25 "$python" "$here/bench/bench.py" waste
part python 25 "$python" "$here/bench/bench.py" python
if [ -f "$TORCH_TESTS" ]; then
  part torch-tests 60 "$python" -c "
import runpy, sys, pinpool_torch
pinpool_torch.install(capacity=4 << 30)
sys.argv = ['test_cuda.py', '-v', '-k', 'pin', '-k', 'host_memory']
runpy.run_path('$TORCH_TESTS', run_name='__main__')"
fi
cat "$OUT/summary.log"
