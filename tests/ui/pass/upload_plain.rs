//! Plain memory cannot be sent asynchronously.
#![allow(unused)]

use pinpool::{DeviceSlice, Stream};

fn misuse(stream: &Stream, buf: Vec<u8>, to: DeviceSlice) {
    stream.upload_blocking(&buf, to).unwrap();
}

fn main() {}
