//! Only the library calls the methods on a lent buffer: code outside that has the bound cannot release one.

#![forbid(unsafe_code)]

fn let_go<B: pinpool::Lend>(buf: B) {
    buf.abandon(); //~ E0061
}

fn main() {
    let _ = let_go::<pinpool::PinnedBuf>;
}
