//! A small server: each call that a server makes, tried again where that is what the error asks for, with a check of
//! every byte that comes back.

use super::*;

#[derive(Default)]
pub struct Report {
    pub wrong: Vec<String>,
    /// What was done with success, so that a clean run can show that it did everything.
    pub done: Vec<&'static str>,
    pub quarantined: usize,
    pub lost: bool,
    pub struck: bool,
    /// How many values of the server's own exist.
    pub values: Arc<AtomicUsize>,
}

pub struct Server<'a> {
    pub machine: &'a Machine,
    pub device: Device,
    pub pool: Pool,
    pub streams: Vec<Stream>,
    pub memory: DeviceSlice,
    /// What each piece of device memory holds for certain.
    pub expected: Vec<Option<u64>>,
    /// Uploads whose handle was dropped: stream, piece, seed. Certain when the stream has been waited for.
    pub sent: Vec<(usize, usize, u64)>,
    pub seed: u64,
    pub report: Report,
}

impl Server<'_> {
    pub fn wrong(&mut self, text: impl Into<String>) {
        self.report.wrong.push(text.into());
    }

    pub fn check(&mut self, pool: &Pool) {
        if let Err(error) = pool.check() {
            self.wrong(error);
        }
    }

    pub fn did(&mut self, what: &'static str) {
        if !self.report.done.contains(&what) {
            self.report.done.push(what);
        }
    }

    /// Tries twice. With one fault in a run, only a lost device fails twice.
    pub fn again<R>(
        &mut self,
        what: &'static str,
        mut call: impl FnMut(&mut Self) -> Result<R>,
    ) -> Option<R> {
        let mut last = None;
        for _ in 0..2 {
            match call(self) {
                Ok(value) => {
                    self.did(what);
                    return Some(value);
                }
                Err(error) if error.is_device_lost() => return None,
                Err(error) => last = Some(error),
            }
            // Resumes what is stalled, as an operator would.
            resume(self.machine);
        }
        if !self.dead() {
            self.wrong(format!("{what} failed twice: {last:?}"));
        }
        None
    }

    pub fn dead(&self) -> bool {
        self.device.lost().is_some()
    }

    pub fn next_seed(&mut self) -> u64 {
        self.seed += 1;
        self.seed
    }

    pub fn slot(&self, slot: usize) -> Result<DeviceSlice> {
        self.memory.slice(slot * SLOT..(slot + 1) * SLOT)
    }

    pub fn checkout(&mut self, len: usize) -> Option<PinnedBuf> {
        self.again("checkout", |s| s.pool.checkout_timeout(len, HANG))
    }

    /// Waits for what is in flight, which may only be lost with the device. What is stalled is resumed after a wait.
    pub fn settle<B: Lend>(&mut self, mut flight: InFlight<B>) -> Option<B> {
        for patience in [Duration::from_millis(50), Duration::from_millis(50), HANG] {
            match flight.wait_timeout(patience) {
                Ok(value) => return Some(value),
                Err(SubmitError { buffer: Some(same), .. }) => flight = same,
                Err(SubmitError { error, buffer: None }) => {
                    if !error.is_device_lost() {
                        self.wrong(format!("a wait ended with {error}, and the device is not lost"));
                    }
                    return None;
                }
            }
            resume(self.machine);
        }
        self.wrong("a wait hangs");
        None
    }

    /// Submits what `make` gives. What was refused and came back is submitted again.
    fn submit<L, B: Lend>(
        &mut self,
        what: &'static str,
        make: impl Fn(&mut Self) -> Result<L>,
        call: impl Fn(&mut Self, L) -> Result<InFlight<B>, SubmitError<L>>,
    ) -> Option<InFlight<B>> {
        let mut back = None;
        self.again(what, |s| {
            let given = back.take().map_or_else(|| make(s), Ok)?;
            call(s, given).map_err(|refused| {
                back = refused.buffer;
                refused.error
            })
        })
    }

    /// Uploads a new pattern. The seed comes with the handle.
    fn upload(&mut self, stream: usize, slot: usize) -> Option<(InFlight<PinnedBuf>, u64)> {
        let seed = self.next_seed();
        // From here on the content is not known, until a copy is reported as complete.
        self.expected[slot] = None;
        let make = |s: &mut Self| {
            let mut buf = s.pool.checkout_timeout(SLOT, HANG)?;
            fill(&mut buf, seed, SLOT);
            Ok(buf)
        };
        let call = |s: &mut Self, buf: PinnedBuf| {
            if *buf != *bytes(seed as usize, SLOT) {
                s.wrong("a refused upload changed its buffer");
            }
            s.streams[stream].upload(buf, s.slot(slot))
        };
        Some((self.submit("upload", make, call)?, seed))
    }

    pub fn upload_and_wait(&mut self, stream: usize, slot: usize) -> Option<()> {
        let (flight, seed) = self.upload(stream, slot)?;
        let buf = self.settle(flight)?;
        if *buf != *bytes(seed as usize, SLOT) {
            self.wrong("a buffer came back from an upload with other bytes");
        }
        self.expected[slot] = Some(seed);
        Some(())
    }

    pub fn upload_and_drop(&mut self, stream: usize, slot: usize) -> Option<()> {
        let (flight, seed) = self.upload(stream, slot)?;
        drop(flight);
        self.sent.push((stream, slot, seed));
        Some(())
    }

    /// After this, what was sent on the stream has certainly arrived.
    pub fn synchronize(&mut self, stream: usize) {
        if self.again("synchronize", |s| s.streams[stream].synchronize()).is_some() {
            for (on, slot, seed) in std::mem::take(&mut self.sent) {
                if on == stream {
                    self.expected[slot] = Some(seed);
                } else {
                    self.sent.push((on, slot, seed));
                }
            }
        }
    }

    pub fn compare(&mut self, slot: usize, found: &[u8], how: &str) {
        if found.len() != SLOT {
            self.wrong(format!("{how}: {} bytes came", found.len()));
        }
        if let Some(seed) = self.expected[slot] {
            if *found != *bytes(seed as usize, SLOT) {
                self.wrong(format!("{how}: wrong bytes at {slot}, reported as done"));
            }
        }
    }

    fn land<L: Landing<Landed = PinnedBuf>>(
        &mut self,
        what: &'static str,
        (stream, slot): (usize, usize),
        make: impl Fn(&mut Self) -> Result<L>,
    ) -> Option<()> {
        let call = |s: &mut Self, landing| s.streams[stream].download(s.slot(slot), landing);
        let flight = self.submit(what, make, call)?;
        let buf = self.settle(flight)?;
        self.compare(slot, &buf, what);
        Some(())
    }

    pub fn download(&mut self, stream: usize, slot: usize) -> Option<()> {
        self.land("download", (stream, slot), |s| s.pool.checkout_timeout(SLOT, HANG))
    }

    pub fn download_stream_ready(&mut self, stream: usize, slot: usize) -> Option<()> {
        self.land("stream-ready download", (stream, slot), |s| s.pool.checkout_on(&s.streams[stream], SLOT))
    }

    pub fn blocking(&mut self, stream: usize, slot: usize) -> Option<()> {
        let seed = self.next_seed();
        self.expected[slot] = None;
        self.again("upload_blocking", |s| {
            s.streams[stream].upload_blocking(&bytes(seed as usize, SLOT), s.slot(slot))
        })?;
        self.expected[slot] = Some(seed);
        let mut back = vec![0; SLOT];
        self.again("download_blocking", |s| s.streams[stream].download_blocking(s.slot(slot), &mut back))?;
        self.compare(slot, &back, "blocking download");
        Some(())
    }

    /// Moves the device, which does not move by itself.
    pub fn nudge(&self) -> bool {
        self.machine.step() | self.device.reap()
    }

    pub fn block_on<R>(&mut self, what: &'static str, future: impl Future<Output = Result<R>>) -> Option<R> {
        let mut future = pin!(future);
        let mut quiet = 0;
        loop {
            match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                Poll::Ready(Ok(value)) => {
                    self.did(what);
                    return Some(value);
                }
                Poll::Ready(Err(_)) => return None,
                Poll::Pending => {}
            }
            quiet = if self.nudge() { 0 } else { quiet + 1 };
            if quiet % 8 == 7 {
                resume(self.machine);
            }
            if quiet > 64 {
                if !self.dead() {
                    self.wrong(format!("{what} hangs"));
                }
                return None;
            }
        }
    }
}
