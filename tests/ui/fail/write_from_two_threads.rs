//! Two threads cannot write to one buffer.
#![allow(unused)]

use pinpool::PinnedBuf;

fn misuse(mut buf: PinnedBuf) {
    std::thread::scope(|scope| {
        scope.spawn(|| buf.clear());
        scope.spawn(|| buf.clear()); //~ E0499
    });
}

fn main() {}
