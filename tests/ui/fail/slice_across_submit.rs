//! No slice of a buffer survives its submission.
#![allow(unused)]

use pinpool::{DeviceSlice, PinnedBuf, Stream};

fn misuse(stream: &Stream, mut buf: PinnedBuf, to: DeviceSlice) {
    let part = &mut buf[..4];
    part[0] = 1;
    let sent = stream.upload(buf, to).unwrap(); //~ E0505
    part[0] = 2;
    drop(sent);
}

fn main() {}
