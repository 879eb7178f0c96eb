//! The device cannot write to a buffer that has other readers.
#![allow(unused)]

use pinpool::{DeviceSlice, PinnedBuf, Stream};

fn misuse(stream: &Stream, buf: PinnedBuf, from: DeviceSlice) {
    drop(stream.download(from, buf).unwrap());
}

fn main() {}
