//! What the library does with a buffer that was lent is its own: code outside that has the bound cannot let go of one.

#![forbid(unsafe_code)]

fn let_go<B: pinpool::Lend>(buf: B) {
    buf.abandon(); //~ E0061
}

fn main() {
    let _ = let_go::<pinpool::PinnedBuf>;
}
