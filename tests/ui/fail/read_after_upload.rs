//! A buffer cannot be read once it was handed to the device.
#![allow(unused)]

use pinpool::{DeviceSlice, PinnedBuf, Stream};

fn misuse(stream: &Stream, buf: PinnedBuf, to: DeviceSlice) {
    let sent = stream.upload(buf, to).unwrap();
    let _first = buf[0]; //~ E0382
    drop(sent);
}

fn main() {}
