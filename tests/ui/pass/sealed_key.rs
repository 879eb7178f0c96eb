//! The argument that methods of sealed traits take cannot be made by inference either.

#![forbid(unsafe_code)]

fn done<B: pinpool::Lend>(buf: B) -> bool {
    Some(buf).is_some()
}

fn main() {
    let _ = done::<pinpool::PinnedBuf>;
}
