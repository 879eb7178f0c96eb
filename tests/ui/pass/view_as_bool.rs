//! Bytes cannot be viewed as a type that not all bytes are values of.
#![allow(unused)]

use pinpool::PinnedBuf;

fn misuse(buf: &PinnedBuf) {
    let _view = buf.view::<f32>().unwrap();
}

fn main() {}
