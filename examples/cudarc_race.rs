//! The same download into cudarc's own pinned slice and into a buffer of the pool: is the copy complete when safe code
//! reads the bytes?
//!
//! `cargo run --release --features cudarc --example cudarc_race` needs an NVIDIA GPU. Both targets are filled with
//! 0xEE, the device's memory with 0x11. A round is stale if the CPU reads a 0xEE after a safe call allowed it to read.
//! The `unsafe` blocks below are not the cause: one switches event tracking off, one promises that no stream is
//! captured, one allocates memory that is written at once.

#![allow(unsafe_code, reason = "cudarc's unsafe calls")]

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream};
use pinpool::Pool;
use pinpool::cudarc::CudarcStream;

const ROUNDS: usize = 5;
const OLD: u8 = 0xEE;
const NEW: u8 = 0x11;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // cudarc panics where there is no driver.
    if let Err(error) = pinpool::Device::open("cuda:0") {
        eprintln!("this example needs an NVIDIA GPU: {error}");
        std::process::exit(1);
    }
    let len = std::env::args().nth(1).map_or(Ok(256 << 20), |text| text.parse())?;
    // A context that has only its default stream does not track events; the first other stream makes it.
    let (single, tracked, untracked) = (CudaContext::new(0)?, CudaContext::new(0)?, CudaContext::new(0)?);
    // SAFETY: nothing in this context is used on more than one stream.
    unsafe { untracked.disable_event_tracking() };
    let cases = [
        ("the default stream", single.default_stream()),
        ("a stream of its own", tracked.new_stream()?),
        ("a stream of its own, event tracking off", untracked.new_stream()?),
    ];
    println!("{len} bytes, {ROUNDS} rounds each");
    println!("{:<42}{:>14}{:>14}", "stale rounds on", "cudarc", "pinpool");
    let mut all_own = 0;
    for (name, stream) in &cases {
        let (theirs, own) = (cudarc_rounds(stream, len)?, pinpool_rounds(stream, len)?);
        println!("{name:<42}{theirs:>14}{own:>14}");
        all_own += own;
    }
    if all_own > 0 {
        return Err("pinpool gave out a buffer before its download was complete".into());
    }
    Ok(())
}

fn cudarc_rounds(stream: &Arc<CudaStream>, len: usize) -> Result<usize, Box<dyn std::error::Error>> {
    let device = stream.clone_htod(&vec![NEW; len])?;
    stream.synchronize()?;
    let mut stale = 0;
    for _ in 0..ROUNDS {
        // SAFETY: written in full before it is read.
        let mut host = unsafe { stream.context().alloc_pinned_with_flags::<u8>(len, 0) }?;
        host.as_mut_slice()?.fill(OLD);
        stream.memcpy_dtoh(&device, &mut host)?;
        stale += usize::from(host.as_slice()?.contains(&OLD));
        stream.synchronize()?;
    }
    Ok(stale)
}

fn pinpool_rounds(stream: &Arc<CudaStream>, len: usize) -> Result<usize, Box<dyn std::error::Error>> {
    // SAFETY: nothing here captures a stream.
    let shared = unsafe { CudarcStream::new(stream) }?;
    let pool = Pool::builder(shared.device()).capacity(len + (64 << 20)).extent(len + (32 << 20)).build()?;
    let device = stream.clone_htod(&vec![NEW; len])?;
    stream.synchronize()?;
    let mut stale = 0;
    for _ in 0..ROUNDS {
        let mut host = pool.checkout(len)?;
        host.try_resize(len, OLD)?;
        let back = shared.download_from(&device, host)?.wait()?;
        stale += usize::from(back.contains(&OLD));
    }
    Ok(stale)
}
