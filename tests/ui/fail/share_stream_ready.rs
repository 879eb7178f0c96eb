//! A stream-ready buffer is not shared by two submits.
#![allow(unused)]

use pinpool::{DeviceSlice, Pool, Stream};

fn misuse(pool: &Pool, stream: &Stream, from: DeviceSlice) {
    let landing = pool.checkout_on(stream, 64).unwrap();
    drop(stream.download(&from, landing).unwrap());
    drop(stream.download(&from, landing).unwrap()); //~ E0382
}

fn main() {}
