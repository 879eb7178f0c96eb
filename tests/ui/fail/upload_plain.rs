//! Plain memory cannot be sent asynchronously.
#![allow(unused)]

use pinpool::{DeviceSlice, Stream};

fn misuse(stream: &Stream, buf: Vec<u8>, to: DeviceSlice) {
    drop(stream.upload(buf, to).unwrap()); //~ E0277
}

fn main() {}
