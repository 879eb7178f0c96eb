//! Plain memory cannot be sent asynchronously.
#![allow(unused)]

use pinpool::{DeviceSlice, Stream, UnpinnedBuf};

fn misuse(stream: &Stream, buf: UnpinnedBuf, to: DeviceSlice) {
    drop(stream.upload(buf, to).unwrap()); //~ E0277
}

fn main() {}
