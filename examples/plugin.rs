//! A shared library with a pool in it, as a program in another language loads it: `plugin_start` opens a device and
//! uploads to it until the process ends.
//!
//! ```text
//! cargo build --example plugin    # target/debug/examples/libplugin.so
//! ```
//!
//! A program may unload such a library (`dlclose`) at any time. The crate's threads need its code, so the system keeps the
//! library until the process ends, and what it does goes on.

#![allow(unsafe_code, reason = "functions for other languages")]

use std::ffi::{CStr, c_char, c_int};
use std::sync::OnceLock;

use pinpool::{Device, Pool, Result, Unpinned};

/// The pool, which lives as long as the process.
static POOL: OnceLock<Pool> = OnceLock::new();

/// Opens the device with this name and begins to upload. 0: it has begun.
///
/// # Safety
/// `device` is a string that ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn plugin_start(device: *const c_char) -> c_int {
    // SAFETY: the caller's promise.
    let device = unsafe { CStr::from_ptr(device) };
    let started = device.to_str().ok().map(start);
    match started {
        Some(Ok(())) => 0,
        Some(Err(error)) => {
            eprintln!("plugin: {error}");
            1
        }
        None => 2,
    }
}

/// Bytes that are checked out. 0: the plugin has not started.
#[unsafe(no_mangle)]
pub extern "C" fn plugin_bytes() -> usize {
    POOL.get().map_or(0, |pool| pool.stats().checked_out_bytes)
}

fn start(device: &str) -> Result<()> {
    let device = Device::open(device)?;
    let pool = Pool::builder(&device).capacity(16 << 20).unpinned(Unpinned::Allow).build()?;
    let (stream, memory) = (device.stream()?, device.alloc(1 << 20)?);
    let uploads = POOL.get_or_init(|| pool).clone();
    std::thread::spawn(move || {
        let upload = || -> Result<()> {
            let mut buffer = uploads.checkout(4096)?;
            buffer.extend_from_slice(&[1; 4096]);
            // The buffer returns to the pool when its copy is complete.
            drop(stream.upload(buffer, memory.slice(..4096)?)?);
            Ok(())
        };
        // The first error is that of the end of the process.
        while upload().is_ok() {}
    });
    Ok(())
}
