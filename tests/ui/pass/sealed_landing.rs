//! A stream-ready buffer has no host-ready half before its copy is complete, whatever bound asks for it.

#![forbid(unsafe_code)]

fn half<L: pinpool::Landing>(landing: L) -> usize {
    let both = (landing,);
    size_of_val(&both)
}

fn main() {
    let _ = half::<pinpool::StreamBuf>;
}
