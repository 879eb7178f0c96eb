//! The promise that bytes were written is the caller's, and unsafe to give.
#![allow(unused)]

use pinpool::PinnedBuf;

fn misuse(mut buf: PinnedBuf) {
    // SAFETY: only compiled.
    unsafe { buf.set_len(4) };
    drop(buf);
}

fn main() {}
