//! Requests of a server on tokio: each waits for a buffer of a small pool, for so long at most, uploads its bytes and
//! awaits the copy. No task blocks a thread, and the pool needs no runtime: any other one does as well.
//!
//! A request that is cancelled drops its future. One that waits leaves the queue then. One whose copy is under way leaves
//! that to the device: the buffer returns to the pool when the copy is done.

use std::time::Duration;

use pinpool::{Device, DeviceBuffer, DeviceSlice, Error, Pool, Stream, Unpinned, host};
use tokio::task::JoinSet;

const REQUESTS: usize = 200;
const LEN: usize = 256 << 10;

/// The server's kernel, which inverts the bytes, submitted to the request's stream. On the host device a function of the
/// CPU stands for it; on a GPU the server launches its own on the same stream, and this example does without.
fn kernel(stream: &Stream, place: DeviceSlice) -> Result<(), Error> {
    let invert = |_: &[&[u8]], writes: &mut [&mut [u8]]| writes[0].iter_mut().for_each(|b| *b = !*b);
    if is_host(stream) { host::launch(stream, &[], &[place], invert).map(drop) } else { Ok(()) }
}

fn is_host(stream: &Stream) -> bool {
    stream.device().name().starts_with("host")
}

/// One request: its bytes go to the device, through the kernel, and come back.
async fn serve(pool: Pool, stream: Stream, memory: DeviceBuffer, request: usize) -> Result<(), Error> {
    // First come, first served. `Error::Timeout` says what the pool had: a server answers 503.
    let mut buf = pool.checkout_async(LEN).timeout(Duration::from_secs(5)).await?;
    buf.try_resize(LEN, request as u8)?;
    let place = memory.slice(request * LEN..(request + 1) * LEN)?;
    let mut buf = stream.upload(buf, &place)?.await?;
    // In the stream's order: after the upload and before the download.
    kernel(&stream, place.clone())?;
    buf.clear();
    let buf = stream.download(&place, buf)?.await?;
    let expected = if is_host(&stream) { !(request as u8) } else { request as u8 };
    assert!(buf.iter().all(|&b| b == expected));
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Error> {
    let device = Device::open("auto")?;
    // Room for 15 requests at a time; the others wait in order.
    let pool = Pool::builder(&device).capacity(4 << 20).unpinned(Unpinned::Allow).build()?;
    let (streams, memory) = ([device.stream()?, device.stream()?], device.alloc(REQUESTS * LEN)?);
    let mut tasks = JoinSet::new();
    let requests: Vec<_> = (0..REQUESTS)
        .map(|i| tasks.spawn(serve(pool.clone(), streams[i % 2].clone(), memory.clone(), i)))
        .collect();
    // Every tenth client goes away.
    requests.iter().step_by(10).for_each(tokio::task::AbortHandle::abort);
    let (mut served, mut gone) = (0, 0);
    while let Some(ended) = tasks.join_next().await {
        match ended {
            Ok(said) => said.map(|()| served += 1)?,
            Err(_cancelled) => gone += 1,
        }
    }
    let waits = pool.stats().waits;
    println!("{}: {served} requests served, {waits} of them waited, {gone} were cancelled", device.name());
    Ok(())
}
