//! Plain memory cannot be sent asynchronously.
#![allow(unused)]

use pinpool::{DeviceSlice, Stream, UnpinnedBuf};

fn misuse(stream: &Stream, buf: UnpinnedBuf, to: DeviceSlice) {
    stream.upload_blocking(&buf, to).unwrap();
}

fn main() {}
