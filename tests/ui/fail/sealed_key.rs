//! The argument that methods of sealed traits take cannot be made by inference either.

#![forbid(unsafe_code)]

fn done<B: pinpool::Lend>(buf: B) -> bool {
    buf.finish(None, Default::default()).is_ok() //~ E0277
}

fn main() {
    let _ = done::<pinpool::PinnedBuf>;
}
