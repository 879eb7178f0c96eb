//! A buffer in flight cannot be read before its copy was waited for.
#![allow(unused)]

use pinpool::{DeviceSlice, PinnedBuf, Stream};

fn misuse(stream: &Stream, buf: PinnedBuf, from: DeviceSlice) {
    let landing = stream.download(from, buf).unwrap();
    let landing = landing.wait().unwrap();
    let _first = landing[0];
}

fn main() {}
