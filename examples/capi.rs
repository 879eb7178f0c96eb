//! The C interface in a shared library of the program's own, which may have more functions than the interface.
//!
//! ```text
//! cargo build --release --features capi --example capi    # target/release/examples/libcapi.so
//! ```
//!
//! The library alone, with its header and a file for pkg-config, is what `cargo cinstall --release` installs (`cargo
//! install cargo-c`).

pub use pinpool::capi::*;
