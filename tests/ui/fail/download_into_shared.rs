//! The device cannot write to a buffer that has other readers.
#![allow(unused)]

use pinpool::{DeviceSlice, PinnedBuf, Stream};

fn misuse(stream: &Stream, buf: PinnedBuf, from: DeviceSlice) {
    let buf = std::sync::Arc::new(buf);
    drop(stream.download(from, buf).unwrap()); //~ E0277
}

fn main() {}
