#!/usr/bin/env bash
# A checkout and a return on a machine with a GPU, beside what a program can use in pinpool's place: the `checkout` bench,
# PyTorch's caching host allocator from C++, CuPy's pool of pinned memory, the driver's own pool of host memory. A peer that
# is missing is skipped, with a message.
#   benches/hot.sh OUT [CHECKOUT]
# CHECKOUT is the bench's executable, if it was built elsewhere; else it is built here. Some four minutes. Writes
# OUT/machine.txt, OUT/checkout.txt (all tables), OUT/lines.txt (name threads median quartile quartile, in ns), and of these
# OUT/peers.md and OUT/peers.svg, by benches/plot.py.
set -uo pipefail
out="${1:?usage: benches/hot.sh OUT [CHECKOUT]}"
here="$(cd "$(dirname "$0")" && pwd)"
mkdir -p "$out"
out="$(cd "$out" && pwd)"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
threads="${PINPOOL_BENCH_THREADS:-1,2,4,8,16}"
export PINPOOL_BENCH_THREADS="$threads"

checkout="${2:-}"
if [ -z "$checkout" ]; then
    (cd "$here/.." && cargo bench --no-run --bench checkout --message-format=json) >"$work/built" || exit 1
    checkout="$(sed -n 's/.*"executable":"\([^"]*\/checkout-[^"]*\)".*/\1/p' "$work/built" | tail -n 1)"
fi
{
    date -u +%Y-%m-%d
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
    echo "$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), $(nproc) cores, kernel $(uname -r)"
} >"$out/machine.txt" 2>&1

# part NAME SECONDS COMMAND...
part() {
    local name="$1" limit="$2" since=$SECONDS rc=0
    shift 2
    timeout "$limit" "$@" >"$work/$name.txt" 2>"$work/$name.err" || rc=$?
    echo "== $name: status $rc, $((SECONDS - since)) s"
    [ "$rc" = 0 ] || tail -n 5 "$work/$name.err"
}
# The groups that are compared with the peers come first, in case the time runs out.
part checkout 110 "$checkout" --only checkout_return,on_a_stream --rounds 21 --operations 60000
part torch 60 bash "$here/peers/run.sh" --take ${threads//,/ }
part driver 40 bash -c 'g++ -std=c++20 -O2 -pthread -o "$0/driver_pool" "$1/peers/driver_pool.cpp" \
    -I"${CUDA_HOME:-/usr/local/cuda}/include" -L"${CUDA_HOME:-/usr/local/cuda}/lib64/stubs" -lcuda && "$0/driver_pool" $2' \
    "$work" "$here" "${threads//,/ }"
part cupy 30 python3 "$here/peers/cupy_pool.py" ${threads//,/ }
part more 150 "$checkout" --only checkout_return_64_live,alike_64_live,cross_thread_return,churn_65536,first_of_a_class,hand_over,tails --rounds 21 --operations 60000
grep -hv '^@' "$work"/{checkout,more}.txt >"$out/checkout.txt"
{
    sed -n 's/^@ //p' "$work"/{checkout,more}.txt
    grep -hE '^[a-z0-9_]+ [0-9]+ [0-9.]+ ' "$work"/{torch,driver,cupy}.txt
} >"$out/lines.txt"
python3 "$here/plot.py" --run "$out/lines.txt" "$out/peers.md" "$out/peers.svg"
