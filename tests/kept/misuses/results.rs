//! Results that are overlooked.

#![allow(unused)]
#![deny(unused_must_use)]

use std::time::Duration;

use pinpool::{Error, Pool, Stream};

/// How a shutdown ended is not overlooked: buffers may still be out.
fn shutdown_ignored(pool: &Pool) {
    pool.shutdown(Duration::ZERO); //~ unused_must_use
    //= assert!(pool.shutdown(Duration::ZERO).drained);
}

/// A stream-ready buffer that no copy takes was checked out for nothing.
fn stream_ready_unused(pool: &Pool, stream: &Stream) -> Result<(), Error> {
    pool.checkout_on(stream, 100)?; //~ unused_must_use
    //= drop(pool.checkout_on(stream, 100)?);
    Ok(())
}
