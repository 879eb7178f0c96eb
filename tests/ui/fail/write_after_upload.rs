//! A buffer cannot be written to once it was handed to the device.
#![allow(unused)]

use pinpool::{DeviceSlice, PinnedBuf, Stream};

fn misuse(stream: &Stream, mut buf: PinnedBuf, to: DeviceSlice) {
    let sent = stream.upload(buf, to).unwrap();
    buf.extend_from_slice(b"late"); //~ E0382
    drop(sent);
}

fn main() {}
