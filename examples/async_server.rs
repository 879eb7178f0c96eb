//! Requests of a server on tokio: each waits for a buffer of a small pool until a deadline, uploads its bytes to
//! one of two slots of device memory, where a kernel inverts them, and answers with what comes back. No task blocks a
//! thread, and the pool needs no runtime: any other one does as well.
//!
//! A request that is cancelled drops its future. One that waits leaves the queue then. One whose copy is under way leaves
//! that to the device: the buffer returns to the pool when the copy is done. That protects host memory alone. A slot of
//! device memory is another request's at once, and the copy of the request that was dropped may still run: see [`Slot`].

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use pinpool::{Device, DeviceSlice, Error, ErrorClass, Pool, Stream, Unpinned, host};
use tokio::sync::Mutex;
use tokio::task::{JoinSet, spawn_blocking};

const REQUESTS: usize = 200;
const LEN: usize = 256 << 10;
const GRACE: Duration = Duration::from_secs(10);

/// What a client is told, by what an error means for the server.
pub(crate) const STATUS: [(ErrorClass, u16, &str); 7] = [
    (ErrorClass::Argument, 500, "the server has made a wrong call; its log has the error's text"),
    (ErrorClass::Capture, 500, "the server has made a wrong call; its log has the error's text"),
    (ErrorClass::Transient, 503, "busy: try again later"),
    (ErrorClass::Closed, 503, "this server goes down: try another one"),
    (ErrorClass::Cancelled, 499, "cancelled"),
    (ErrorClass::DeviceLost, 500, "no request can succeed before this server is started again"),
    (ErrorClass::DriverShutdown, 503, "this server goes down: try another one"),
];

/// What a client is told. Two errors are its own doing, since it chose the length.
pub(crate) fn answer(error: &Error) -> (u16, &'static str) {
    match error {
        Error::ZeroLength => (400, "the request has no bytes"),
        Error::TooLong { .. } => (413, "the request has too many bytes"),
        _ => {
            let row = STATUS.iter().find(|(class, ..)| *class == error.class());
            row.map_or((500, "an error of a class that is not listed"), |(_, status, text)| (*status, text))
        }
    }
}

/// Device memory that requests use in turn, and the stream for everything that uses it. So what a cancelled request has
/// left in flight comes before the work of the next request.
///
/// Where a slot is used on several streams, its next user first calls `stream.wait_for(&last)`, or the slot is
/// given back by a task of its own that has awaited `last.hold(())?`.
pub(crate) struct Slot {
    stream: Stream,
    memory: DeviceSlice,
}

impl Slot {
    pub(crate) fn new(device: &Device) -> Result<Self, Error> {
        Ok(Self { stream: device.stream()?, memory: device.alloc(LEN)? })
    }
}

/// The server's kernel, which inverts the bytes. On the host device a function of the CPU stands for it; on a GPU the
/// server launches its own on the same stream, and this example does without.
fn kernel(stream: &Stream, place: DeviceSlice) -> Result<(), Error> {
    let invert = |_: &[&[u8]], writes: &mut [&mut [u8]]| writes[0].iter_mut().for_each(|b| *b = !*b);
    if is_host(stream.device()) { host::launch(stream, &[], &[place], invert).map(drop) } else { Ok(()) }
}

fn is_host(device: &Device) -> bool {
    device.name().starts_with("host")
}

/// What a client gets back for a byte.
pub(crate) fn answered(device: &Device, byte: u8) -> u8 {
    if is_host(device) { !byte } else { byte }
}

/// One request: its bytes go to the device, through the kernel, and come back.
pub(crate) async fn serve(pool: Pool, slot: Arc<Mutex<Slot>>, body: Vec<u8>) -> Result<Bytes, Error> {
    // First come, first served. `Error::Timeout` says what the pool had.
    let mut buf = pool.checkout_async(body.len()).timeout(Duration::from_secs(5)).await?;
    buf.try_extend_from_slice(&body)?;
    let slot = slot.lock().await;
    let place = slot.memory.slice(..body.len())?;
    let buf = slot.stream.upload(buf, &place)?.await?;
    // In the stream's order: after the upload and before the download.
    kernel(&slot.stream, place.clone())?;
    let buf = slot.stream.download(&place, buf)?.await?;
    // The answer's body is the pinned memory itself: no byte is copied, and the buffer returns to the pool when the
    // HTTP server has sent it and drops the `Bytes`. (A client that reads slowly keeps the buffer for as long.)
    Ok(Bytes::from_owner(buf))
}

#[tokio::main]
pub(crate) async fn main() -> Result<(), Error> {
    let device = Device::open("auto")?;
    // Room for 15 requests at a time; the others wait in order.
    let pool = Pool::builder(&device).capacity(4 << 20).unpinned(Unpinned::Allow).build()?;
    let slots = [Slot::new(&device)?, Slot::new(&device)?].map(|slot| Arc::new(Mutex::new(slot)));
    let mut tasks = JoinSet::new();
    let requests: Vec<_> = (0..REQUESTS)
        .map(|i| {
            // Some clients send too much, and some nothing.
            let len = match i % 50 {
                8 => 8 << 20,
                9 => 0,
                _ => LEN,
            };
            let served = serve(pool.clone(), slots[i % 2].clone(), vec![i as u8; len]);
            let expected = answered(&device, i as u8);
            tasks.spawn(async move {
                let body = served.await.map_err(|error| answer(&error).0)?;
                assert!(body.len() == len && body.iter().all(|&byte| byte == expected));
                Ok::<(), u16>(())
            })
        })
        .collect();
    // Every tenth client goes away.
    requests.iter().step_by(10).for_each(tokio::task::AbortHandle::abort);
    let mut answers = BTreeMap::<u16, usize>::new();
    while let Some(ended) = tasks.join_next().await {
        let status = ended.map_or(499, |served| served.err().unwrap_or(200));
        *answers.entry(status).or_default() += 1;
    }
    let waits = pool.stats().waits;
    println!("{}: answers by status: {answers:?}; {waits} requests waited", device.name());

    // Both calls block their thread, so they get one of their own.
    let end = move || {
        let ended = pool.shutdown(GRACE);
        drop((pool, slots));
        (ended, device.close(GRACE))
    };
    match spawn_blocking(end).await {
        Ok((ended, Ok(()))) if ended.drained => {}
        Ok((ended, closed)) => eprintln!("{ended:?}, {:?}", closed.map_err(|left| left.to_string())),
        Err(panicked) => eprintln!("{panicked}"),
    }
    Ok(())
}
