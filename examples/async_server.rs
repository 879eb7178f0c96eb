//! Tasks that share a small pool: each awaits a buffer, uploads it, and awaits the copy. No task blocks a thread.
//!
//! The crate needs no async runtime. This example polls its tasks by hand, on one thread that sleeps until a task is
//! woken; a server spawns them on its own runtime.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;

use pinpool::{Device, DeviceBuffer, Error, Pool, Stream, Unpinned};

const REQUESTS: usize = 200;
const LEN: usize = 256 << 10;

/// One request: its bytes go to the device and come back unchanged.
async fn serve(pool: &Pool, stream: &Stream, memory: &DeviceBuffer, request: usize) -> Result<(), Error> {
    // First come, first served. A dropped future, for example of a cancelled request, leaves the queue.
    let mut buf = pool.checkout_async(LEN).await?;
    buf.try_resize(LEN, request as u8)?;
    let place = memory.slice(request * LEN..(request + 1) * LEN)?;
    let mut buf = stream.upload(buf, &place)?.await?;
    buf.clear();
    let buf = stream.download(&place, buf)?.await?;
    assert!(buf.iter().all(|&b| b == request as u8));
    Ok(())
}

fn main() -> Result<(), Error> {
    let device = Device::open("auto")?;
    // Room for 15 requests at a time; the others wait in order.
    let pool = Pool::builder(&device).capacity(4 << 20).unpinned(Unpinned::Allow).build()?;
    let (streams, memory) = ([device.stream()?, device.stream()?], device.alloc(REQUESTS * LEN)?);
    let tasks = (0..REQUESTS).map(|i| serve(&pool, &streams[i % 2], &memory, i));
    run_all(tasks)?;
    let stats = pool.stats();
    let (pinned, waits) = (stats.pinned_bytes, stats.waits);
    println!(
        "{REQUESTS} requests served on {} with {pinned} pinned bytes, {waits} of them waited",
        device.name()
    );
    Ok(())
}

/// Wakes the thread that polls.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Polls all tasks until each is done. A real runtime would poll only those that were woken.
fn run_all<'a>(
    tasks: impl Iterator<Item = impl Future<Output = Result<(), Error>> + 'a>,
) -> Result<(), Error> {
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut cx = Context::from_waker(&waker);
    let mut tasks: Vec<Pin<Box<_>>> = tasks.map(Box::pin).collect();
    while !tasks.is_empty() {
        let mut left = Vec::new();
        for mut task in tasks {
            match task.as_mut().poll(&mut cx) {
                Poll::Ready(result) => result?,
                Poll::Pending => left.push(task),
            }
        }
        tasks = left;
        if !tasks.is_empty() {
            std::thread::park();
        }
    }
    Ok(())
}
