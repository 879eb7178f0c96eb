//! A stream-ready buffer has no host-ready half before its copy is complete, whatever bound asks for it.

#![forbid(unsafe_code)]

fn half<L: pinpool::Landing>(landing: L) -> usize {
    let both = landing.land(); //~ E0061
    size_of_val(&both)
}

fn main() {
    let _ = half::<pinpool::StreamBuf>;
}
