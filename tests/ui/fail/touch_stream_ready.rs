//! The CPU cannot use a stream-ready buffer: earlier work may still read it.
#![allow(unused)]

use pinpool::{Pool, Stream};

fn misuse(pool: &Pool, stream: &Stream) {
    let landing = pool.checkout_on(stream, 64).unwrap();
    let mut landing = landing;
    landing.extend_from_slice(b"mine"); //~ E0599
}

fn main() {}
