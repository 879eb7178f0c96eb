# Functions that .ci/run, .ci/full and the scripts beside them share, by sourcing this file.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export CARGO_INCREMENTAL=0 CARGO_TERM_COLOR="${CARGO_TERM_COLOR:-never}" RUST_BACKTRACE="${RUST_BACKTRACE:-1}"
PATH="$PATH:${CARGO_HOME:-$HOME/.cargo}/bin" # where `cargo install` puts things
# Each step sets its own flags; flags from outside would make them test something else.
unset RUSTFLAGS RUSTDOCFLAGS CARGO_ENCODED_RUSTFLAGS CARGO_BUILD_TARGET CARGO_TARGET_DIR

# A line for each step: NAME <tab> RESULT <tab> SECONDS. .ci/full names the file, so that both scripts write into one.
CI_ROWS="${CI_ROWS:-$PWD/target/ci-rows.$$}"
# 1: continue after a failed step and fail at the end; 0: stop at a failed step.
CI_KEEP_GOING="${CI_KEEP_GOING:-0}"
export CI_ROWS CI_KEEP_GOING

say() { printf '%s\n' "$*"; }
die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# step NAME COMMAND...: prints a heading, runs the command, prints and records the result and the time.
step() {
    local name="$1" start="$SECONDS" rc=0 took result
    shift
    printf '\n======== %s\n+ %s\n' "$name" "$*"
    # A program or a script, never a function: inside `||` a function would lose its `set -e`.
    "$@" </dev/null || rc=$?
    took=$((SECONDS - start))
    if ((rc == 0)); then result=ok; else result="FAILED ($rc)"; fi
    printf -- '-------- %s: %s, %d s\n' "$name" "$result" "$took"
    printf '%s\t%s\t%d\n' "$name" "$result" "$took" >>"$CI_ROWS"
    if ((rc != 0)) && [ "$CI_KEEP_GOING" != 1 ]; then
        table
        die "step '$name' failed with status $rc"
    fi
}

# skip NAME WHY: records a step that is not run.
skip() {
    printf '\n======== %s\n-------- %s: skipped (%s)\n' "$1" "$1" "$2"
    printf '%s\tskipped: %s\t0\n' "$1" "$2" >>"$CI_ROWS"
}

# Prints the steps so far.
table() {
    printf '\n%-44s %-28s %8s\n' step result seconds
    awk -F '\t' '{ printf "%-44s %-28s %8d\n", $1, $2, $3; s += $3 } END { printf "%-44s %-28s %8d\n", "in all", "", s }' "$CI_ROWS"
}

failed() { grep -c "$(printf '\t')FAILED" "$CI_ROWS" || true; }

# The oldest Rust that Cargo.toml promises, such as 1.85.
msrv() { sed -n 's/^rust-version *= *"\([0-9.]*\)"/\1/p' Cargo.toml; }

# counted COMMAND...: runs a command that runs tests, and prints at the end which tests were skipped and how many, from
# the lines that tests/support/skip.rs writes.
counted() {
    local log skipped rc=0
    log="$(mktemp)"
    "$@" 2>&1 | tee "$log" || rc=$?
    skipped="$(sed -n 's/^.*skipped: //p' "$log" | sort -u)"
    rm -f "$log"
    say "skipped, all or in part: $(awk 'NF' <<<"$skipped" | wc -l)" "$skipped"
    return "$rc"
}
