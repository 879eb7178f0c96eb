//! The bytes of a download are not the handle's to give.
#![allow(unused)]

use pinpool::{DeviceSlice, PinnedBuf, Stream};

fn misuse(stream: &Stream, buf: PinnedBuf, from: DeviceSlice) {
    let landing = stream.download(from, buf).unwrap();
    let _bytes: &[u8] = landing.as_ref(); //~ E0599
}

fn main() {}
