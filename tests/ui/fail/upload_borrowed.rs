//! Borrowed memory cannot be sent asynchronously: the caller may free it under the copy.
#![allow(unused)]

use pinpool::{DeviceSlice, Stream};

fn misuse(stream: &Stream, bytes: &[u8], to: DeviceSlice) {
    stream.upload(bytes, to).unwrap(); //~ E0277
}

fn main() {}
