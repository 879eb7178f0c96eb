//! A buffer has one owner.
#![allow(unused)]

use pinpool::PinnedBuf;

fn misuse(buf: PinnedBuf) {
    let other: Vec<u8> = buf.to_vec();
    drop((buf, other));
}

fn main() {}
