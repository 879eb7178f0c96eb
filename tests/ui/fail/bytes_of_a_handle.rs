//! The handle of a download gives no access to its bytes.
#![allow(unused)]

use pinpool::{DeviceSlice, PinnedBuf, Stream};

fn misuse(stream: &Stream, buf: PinnedBuf, from: DeviceSlice) {
    let landing = stream.download(from, buf).unwrap();
    let _bytes: &[u8] = landing.as_ref(); //~ E0599
}

fn main() {}
