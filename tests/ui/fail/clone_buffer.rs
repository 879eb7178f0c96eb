//! A buffer has one owner.
#![allow(unused)]

use pinpool::PinnedBuf;

fn misuse(buf: PinnedBuf) {
    let other: PinnedBuf = buf.clone(); //~ E0599
    drop((buf, other));
}

fn main() {}
