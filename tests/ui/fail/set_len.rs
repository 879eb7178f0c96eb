//! The promise that bytes were written is the caller's, and unsafe to give.
#![allow(unused)]

use pinpool::PinnedBuf;

fn misuse(mut buf: PinnedBuf) {
    buf.set_len(4); //~ E0133
    drop(buf);
}

fn main() {}
