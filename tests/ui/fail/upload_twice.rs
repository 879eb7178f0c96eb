//! One buffer is not sent twice. (An `Arc` of it can be.)
#![allow(unused)]

use pinpool::{DeviceSlice, PinnedBuf, Stream};

fn misuse(stream: &Stream, buf: PinnedBuf, to: DeviceSlice) {
    let first = stream.upload(buf.clone(), &to).unwrap(); //~ E0599
    let second = stream.upload(buf, &to).unwrap();
    drop((first, second));
}

fn main() {}
