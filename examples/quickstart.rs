//! The main path: bytes go to a device and back through a pool.
//!
//! `cargo run --example quickstart` runs on an accelerator if there is one, else on the host device.

use pinpool::{Device, Pool, Unpinned};

fn main() -> Result<(), pinpool::Error> {
    let device = Device::open("auto")?;
    // A server leaves `unpinned` at its default, which is to refuse. This example runs under any memlock limit.
    let pool = Pool::builder(&device).capacity(64 << 20).unpinned(Unpinned::Allow).build()?;
    let stream = device.stream()?;
    let bytes: Vec<u8> = (0..1 << 20).map(|i| (i % 251) as u8).collect();
    let weights = device.alloc(bytes.len())?;

    // Host-ready: no other code has this buffer, and no device work is outstanding on it.
    let mut buf = pool.checkout(bytes.len())?;
    buf.try_extend_from_slice(&bytes)?;

    // The upload takes the buffer, so no code can write to it during the copy. `wait` gives it back, to be filled
    // again.
    let sent = stream.upload(buf, &weights)?;
    let mut buf = sent.wait()?;
    buf[0] = 42;
    // The handle may be dropped instead: the buffer then returns to the pool when the copy is complete.
    drop(stream.upload_part(buf, ..1, weights.slice(..1))?);

    // Stream-ready: may still be in flight on this stream, whose order protects it. The CPU cannot touch it.
    let landing = pool.checkout_on(&stream, bytes.len())?;
    let back = stream.download(&weights, landing)?.wait()?;
    assert_eq!(back[0], 42);
    assert_eq!(back[1..], bytes[1..]);
    println!("{} bytes went to {} and back", back.len(), device.name());

    drop(back);
    let stats = pool.stats();
    println!("{} bytes pinned, {} checkouts, {} waits", stats.pinned_bytes, stats.checkouts, stats.waits);
    Ok(())
}
