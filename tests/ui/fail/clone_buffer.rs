//! A buffer has one owner.
#![allow(unused)]

use pinpool::PinnedBuf;

fn misuse(buf: PinnedBuf) {
    let other: PinnedBuf = buf.clone();
    drop((buf, other));
}

fn main() {}
