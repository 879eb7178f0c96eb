//! The handle of a download gives no access to its bytes.
#![allow(unused)]

use pinpool::{DeviceSlice, PinnedBuf, Stream};

fn misuse(stream: &Stream, buf: PinnedBuf, from: DeviceSlice) {
    let landing = stream.download(from, buf).unwrap();
    let _bytes: Vec<u8> = landing.wait().unwrap().to_vec();
}

fn main() {}
