//! A stream-ready buffer that no copy takes was checked out for nothing.
#![allow(unused)]
#![deny(unused_must_use)]

use pinpool::{Pool, Stream};

fn misuse(pool: &Pool, stream: &Stream) -> Result<(), pinpool::Error> {
    pool.checkout_on(stream, 100)?; //~ unused_must_use
    Ok(())
}

fn main() {}
