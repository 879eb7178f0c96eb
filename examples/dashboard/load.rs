//! A load like that of an inference server, so that the dashboard has something to show.
//!
//! Four kinds of threads share the pool, each with a stream of its own:
//!
//! - *weights*: every 400 ms a model is loaded, in uploads of 4 MiB, three of them in flight at once;
//! - *cache*: blocks of a key-value cache of 256 KiB to 1 MiB go to the host and back;
//! - *requests* (two threads): small tensors of 1 to 64 KiB go to the device and back;
//! - *bursts*: every few seconds the thread takes all memory that is left and keeps it for 300 ms. Meanwhile the other
//!   threads wait, and the burst's own last request times out, so that waits and timeouts show.
//!
//! A thread that meets an error other than a short pool prints it and ends; the page then shows a lost device, or less
//! traffic.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pinpool::{Device, Error, Pool, Request};

/// The threads of the load. Dropping it ends them.
pub struct Load {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

/// A thread's function, which returns when `stop` is set.
type Work = fn(&Worker) -> Result<(), Error>;

/// What a thread works with.
struct Worker {
    pool: Pool,
    device: Device,
    stop: Arc<AtomicBool>,
}

impl Load {
    pub fn start(pool: &Pool, device: &Device) -> std::io::Result<Self> {
        let mut load = Self { stop: Arc::default(), threads: Vec::new() };
        let kinds: [(&str, Work); 5] = [
            ("weights", weights),
            ("cache", cache),
            ("requests-0", requests),
            ("requests-1", requests),
            ("bursts", bursts),
        ];
        for (name, work) in kinds {
            let worker = Worker { pool: pool.clone(), device: device.clone(), stop: load.stop.clone() };
            let thread = std::thread::Builder::new().name(name.into()).spawn(move || {
                if let Err(error) = work(&worker) {
                    eprintln!("{name} ends: {error}");
                }
            })?;
            load.threads.push(thread);
        }
        Ok(load)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        // Relaxed: no other data depends on the flag.
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // The panic hook has printed a panic's message.
            let _ = thread.join();
        }
    }
}

impl Worker {
    fn goes_on(&self) -> bool {
        !self.stop.load(Ordering::Relaxed)
    }

    /// Sleeps, but not beyond the end of the load.
    fn pause(&self, time: Duration) {
        let end = Instant::now() + time;
        while self.goes_on() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            std::thread::sleep(left.min(Duration::from_millis(50)));
        }
    }
}

fn weights(worker: &Worker) -> Result<(), Error> {
    let capacity = worker.pool.stats().capacity_bytes;
    let (chunk, chunks) = ((capacity / 16).min(4 << 20), 12);
    let (stream, memory) = (worker.device.stream()?, worker.device.alloc(chunk * chunks)?);
    while worker.goes_on() {
        let mut sent = VecDeque::new();
        for i in 0..chunks {
            // Three in flight while the next is filled.
            let mut buf = match sent.len() {
                3 => sent.pop_front().map_or_else(|| worker.pool.checkout(chunk), pinpool::InFlight::wait)?,
                _ => worker.pool.checkout(Request::new(chunk).tag("weights"))?,
            };
            buf.clear();
            buf.try_resize(chunk, i as u8)?;
            sent.push_back(stream.upload(buf, memory.slice(i * chunk..(i + 1) * chunk))?);
        }
        drop(sent);
        worker.pause(Duration::from_millis(400));
    }
    stream.synchronize()
}

fn cache(worker: &Worker) -> Result<(), Error> {
    let (stream, memory) = (worker.device.stream()?, worker.device.alloc(1 << 20)?);
    for len in [256 << 10, 512 << 10, 1 << 20, 384 << 10].into_iter().cycle().take_while(|_| worker.goes_on())
    {
        let landing = worker.pool.checkout_on(&stream, Request::new(len).tag("cache"))?;
        let block = stream.download(memory.slice(..len), landing)?.wait()?;
        worker.pause(Duration::from_millis(10));
        drop(stream.upload(block, memory.slice(..len))?);
    }
    stream.synchronize()
}

fn requests(worker: &Worker) -> Result<(), Error> {
    let (stream, memory) = (worker.device.stream()?, worker.device.alloc(64 << 10)?);
    for len in
        [1, 3, 16, 64, 6, 2, 40].into_iter().map(|kib| kib << 10).cycle().take_while(|_| worker.goes_on())
    {
        let mut buf = worker.pool.checkout(Request::new(len).tag("request"))?;
        buf.try_resize(len, 7)?;
        let mut buf = stream.upload(buf, memory.slice(..len))?.wait()?;
        buf.clear();
        drop(stream.download(memory.slice(..len), buf)?.wait()?);
        worker.pause(Duration::from_millis(2));
    }
    Ok(())
}

fn bursts(worker: &Worker) -> Result<(), Error> {
    while worker.goes_on() {
        let mut taken = Vec::new();
        let short = loop {
            let request = Request::new(1 << 20).tag("burst");
            match worker.pool.checkout_timeout(request, Duration::from_millis(20)) {
                Ok(buf) => taken.push(buf),
                Err(error) => break error,
            }
        };
        if !matches!(short, Error::Timeout(_) | Error::Exhausted(_)) {
            return Err(short);
        }
        worker.pause(Duration::from_millis(300));
        drop(taken);
        worker.pause(Duration::from_secs(4));
    }
    Ok(())
}
