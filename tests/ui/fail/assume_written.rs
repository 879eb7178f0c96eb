//! That something was written is the caller's word, which is unsafe to give.
#![allow(unused)]

use pinpool::PinnedBuf;

fn misuse(mut buf: PinnedBuf) {
    buf.assume_written(4); //~ E0133
    drop(buf);
}

fn main() {}
