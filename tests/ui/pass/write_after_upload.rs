//! A buffer cannot be written to once it was handed to the device.
#![allow(unused)]

use pinpool::{DeviceSlice, PinnedBuf, Stream};

fn misuse(stream: &Stream, mut buf: PinnedBuf, to: DeviceSlice) {
    let sent = stream.upload(buf, to).unwrap();
    sent.is_done().unwrap();
    drop(sent);
}

fn main() {}
