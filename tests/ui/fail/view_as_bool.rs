//! Bytes cannot be viewed as a type that not all bytes are values of.
#![allow(unused)]

use pinpool::PinnedBuf;

fn misuse(buf: &PinnedBuf) {
    let _view = buf.view::<bool>().unwrap(); //~ E0277
}

fn main() {}
