//! A handle is used up by waiting.
#![allow(unused)]

use pinpool::{DeviceSlice, PinnedBuf, Stream};

fn misuse(stream: &Stream, buf: PinnedBuf, to: DeviceSlice) {
    let sent = stream.upload(buf, to).unwrap();
    let back = sent.wait().unwrap();
    sent.is_done().unwrap(); //~ E0382
    drop(back);
}

fn main() {}
