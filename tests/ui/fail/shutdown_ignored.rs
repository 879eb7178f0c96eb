//! How a shutdown ended is not overlooked: buffers may still be out.
#![allow(unused)]
#![deny(unused_must_use)]

use std::time::Duration;

use pinpool::Pool;

fn misuse(pool: &Pool) {
    pool.shutdown(Duration::ZERO); //~ unused_must_use
}

fn main() {}
