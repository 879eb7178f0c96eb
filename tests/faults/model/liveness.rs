//! Liveness: nothing waits that what is free could serve, and each wait is told its deadline.
//!
//! Random requests of all forms: one buffer of a class, of whole pages, aligned; several together; with
//! deadlines, and cancelled. Beside them returns, trims, and growth, which some of the machines refuse at
//! times. [`Pool::check`] must find nothing after any step: it looks for waiters that what is free outside of
//! windows could serve. At the end some buffers stay out. After the longest pause between two looks at the
//! queue the oracle is that *a request that waits, made anew, is not served at once* either.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use pinpool::host::{Call, Failure, Fault, HostConfig, HostNode};
use pinpool::{Checkout, Device, Error, PinnedBuf, Pool, Request, Unpinned};

use crate::model::world::Flag;
use crate::support::{HANG, Random, variable};

/// More than the longest pause before a growth is tried again, eight looks at a pool's queue, on a machine that is busy.
const PAUSE: Duration = Duration::from_millis(2200);
/// Pools that are brought into a state and then left alone together.
const POOLS: u64 = 24;
const STEPS: usize = 40;
const CAPACITY: usize = 4 << 20;

impl Random {
    fn request(&mut self, largest: usize) -> Request {
        let len = match self.below(5) {
            0 => 1 + self.below(500),
            1 => 4096,
            2 => 1 + self.below(largest / 32),
            3 => 1 + self.below(largest / 8),
            _ => 1 + self.below(largest),
        };
        let request = Request::new(len);
        if self.one_in(4) { request.align(1 << (6 + self.below(9))) } else { request }
    }

    /// One request, or several together.
    fn requests(&mut self, largest: usize) -> Vec<Request> {
        let several = self.one_in(2);
        let n = if several { 2 + self.below(4) } else { 1 };
        match several && self.one_in(3) {
            true => vec![self.request(largest); n],
            false => (0..n).map(|_| self.request(largest)).collect(),
        }
    }
}

struct Wait {
    future: Checkout<Vec<PinnedBuf>>,
    requests: Vec<Request>,
    flag: Arc<Flag>,
    deadline: Option<Instant>,
}

impl Wait {
    fn poll(&mut self) -> Poll<pinpool::Result<Vec<PinnedBuf>>> {
        let waker = Waker::from(self.flag.clone());
        Pin::new(&mut self.future).poll(&mut Context::from_waker(&waker))
    }
}

/// A pool, and what a program does with it on one thread.
struct Program {
    seed: u64,
    /// A machine of its own, which refuses to pin at times.
    refuses: Option<HostNode>,
    random: Random,
    pool: Pool,
    held: Vec<PinnedBuf>,
    waits: Vec<Wait>,
}

impl Program {
    fn new(seed: u64, device: &Device) -> Self {
        let mut random = Random::new(seed);
        let region = [1 << 20, 2 << 20, 4 << 20][random.below(3)];
        let initial = if random.one_in(3) { region } else { CAPACITY };
        let cache = [0, 256 << 10, 1 << 20][random.below(3)];
        let builder = |device, region, initial| {
            let builder = Pool::builder(device).capacity(CAPACITY).region(region).initial(initial);
            builder.extent(CAPACITY).thread_cache(cache)
        };
        // Every third pool grows from little. (Where little memory may be locked, there are none of these.)
        let node = HostNode::new(HostConfig::new()).unwrap();
        let own = Device::on(&node, 0).unwrap();
        let grows = builder(&own, region / 4, region / 4).unpinned(Unpinned::Refuse).build();
        let (refuses, pool) = match grows {
            Ok(pool) if seed % 3 == 0 => (Some(node), pool),
            _ => (None, builder(device, region, initial).unpinned(Unpinned::Allow).build().unwrap()),
        };
        pool.wait_pinned(None).unwrap();
        // Buffers of many sizes fill the pool.
        let mut held = Vec::new();
        held.extend(std::iter::from_fn(|| pool.try_checkout(random.request(400_000)).ok()));
        for len in [32 << 10, 4000] {
            held.extend(std::iter::from_fn(|| pool.try_checkout(len).ok()));
        }
        Self { seed, refuses, random, pool, held, waits: Vec::new() }
    }

    fn step(&mut self) {
        match self.random.below(11) {
            0..=2 => {
                let requests = self.random.requests(400_000);
                let got = self.pool.checkout_many(&requests, Some(Duration::ZERO));
                self.held.extend(got.into_iter().flatten());
            }
            3..=5 if !self.held.is_empty() => {
                drop(self.held.swap_remove(self.random.below(self.held.len())));
            }
            6 | 7 => {
                let requests = self.random.requests(400_000);
                let mut future = self.pool.checkout_many_async(&requests);
                let timeout =
                    self.random.one_in(4).then(|| Duration::from_millis(self.random.below(300) as u64));
                let deadline = timeout.map(|timeout| Instant::now() + timeout);
                if let Some(timeout) = timeout {
                    future = future.timeout(timeout);
                }
                let mut wait = Wait { future, requests, flag: Arc::default(), deadline };
                match wait.poll() {
                    Poll::Pending => self.waits.push(wait),
                    Poll::Ready(got) => self.held.extend(got.into_iter().flatten()),
                }
            }
            8 if !self.waits.is_empty() => {
                drop(self.waits.swap_remove(self.random.below(self.waits.len())));
            }
            9 => self.poll_woken(),
            10 => _ = self.pool.trim(self.random.below(CAPACITY)),
            _ => {}
        }
        if let Some(node) = self.refuses.as_ref().filter(|_| self.random.one_in(6)) {
            for nth in 0..self.random.below(4) as u64 {
                node.fail(Fault { device: 0, call: Call::Pin, nth, failure: Failure::Transient });
            }
        }
        self.check();
    }

    fn check(&self) {
        if let Err(violation) = self.pool.check() {
            self.fail(&violation.to_string());
        }
    }

    fn fail(&self, what: &str) -> ! {
        panic!("seed {}: {what}\n{:?}", self.seed, self.pool.stats());
    }

    fn poll_woken(&mut self) {
        self.waits.retain_mut(|wait| {
            if !wait.flag.is_set() {
                return true;
            }
            let Poll::Ready(got) = wait.poll() else { return true };
            self.held.extend(got.into_iter().flatten());
            false
        });
    }

    /// Buffers come back, in the order of their addresses or another, until few are left or much is free.
    fn return_most(&mut self) {
        let few = self.random.below(4);
        let needed: usize = self.waits.iter().flat_map(|wait| &wait.requests).map(bytes).sum();
        let order = self.random.below(3);
        self.held.sort_by_key(|buf| buf.as_ptr().addr());
        if order == 1 {
            self.held.reverse();
        }
        while self.held.len() > few && self.pool.stats().free_bytes < needed + needed / 2 + (64 << 10) {
            let at = if order == 2 { self.random.below(self.held.len()) } else { 0 };
            drop(self.held.remove(at));
            self.check();
        }
    }

    /// After the pause.
    fn judge(&mut self) {
        self.check();
        for wait in &self.waits {
            if wait.deadline.is_some() && !wait.flag.is_set() {
                self.fail(&format!("not told its deadline: {:?}", wait.requests));
            }
        }
        self.poll_woken();
        self.check();
        if self.waits.is_empty() {
            return;
        }
        let wait = self.waits.swap_remove(self.random.below(self.waits.len()));
        let requests = wait.requests;
        drop(wait.future);
        // What was withheld for it may have served another, and what was withheld for that may serve it now.
        if self.waits.iter().any(|wait| wait.flag.is_set()) {
            return;
        }
        // What it is served from may have to be pinned first.
        let soon = Duration::from_millis(if self.refuses.is_some() { 400 } else { 0 });
        if self.pool.checkout_many(&requests, Some(soon)).is_ok() {
            self.fail(&format!("it has waited, and is served when made anew: {requests:?}"));
        }
    }
}

fn bytes(request: &Request) -> usize {
    request.segment_bytes().unwrap()
}

fn seconds(default: u64) -> Duration {
    Duration::from_secs(variable("PINPOOL_LIVENESS_SECONDS", default))
}

#[test]
fn a_request_that_waits_is_not_served_when_made_anew() {
    let device = Device::open("host").unwrap();
    let (end, mut seed) = (Instant::now() + seconds(1), variable("PINPOOL_SEED", 1) * 1_000_000);
    loop {
        let mut programs: Vec<_> = (seed..seed + POOLS).map(|seed| Program::new(seed, &device)).collect();
        seed += POOLS;
        for program in &mut programs {
            (0..STEPS).for_each(|_| program.step());
            program.refuses.iter().for_each(|node| _ = node.clear_faults());
            program.return_most();
        }
        std::thread::sleep(PAUSE);
        let waiting = programs.iter().map(|program| program.waits.len()).sum::<usize>();
        assert!(waiting > 0, "nothing waits");
        programs.iter_mut().for_each(Program::judge);
        if Instant::now() >= end {
            return;
        }
    }
}

/// How long a request may wait while others, none of which keeps its buffers for long, are granted so many.
const LONG: Duration = Duration::from_millis(1500);
const MANY: u64 = 2000;

#[test]
fn no_request_starves_beside_others_that_come_and_go() {
    let device = Device::open("host").unwrap();
    let end = Instant::now() + seconds(3);
    let (mut seed, mut first) = (variable("PINPOOL_SEED", 1) * 1000, true);
    while Instant::now() < end {
        seed += 1;
        let mut random = Random::new(seed);
        let cache = [0, 256 << 10][random.below(2)];
        let pool = Pool::builder(&device).capacity(2 << 20).thread_cache(cache).unpinned(Unpinned::Allow);
        let pool = pool.build().unwrap();
        // Often all requests are for one size, and two threads ask for several such buffers.
        let len = if first { 256 << 10 } else { 1 + random.below(280_000) };
        let same = (first || random.one_in(2)).then(|| Request::new(len));
        first = false;
        let (grants, round) = (AtomicU64::new(0), (Instant::now() + Duration::from_secs(10)).min(end));
        std::thread::scope(|scope| {
            for nth in 0..8 {
                let (pool, grants) = (&pool, &grants);
                scope.spawn(move || {
                    let mut random = Random::new(seed * 100 + nth);
                    let usual = match same {
                        Some(request) => vec![request; if nth < 2 { 3 } else { 1 }],
                        None => random.requests(250_000),
                    };
                    while Instant::now() < round {
                        let requests = match same.is_none() && random.one_in(4) {
                            true => random.requests(250_000),
                            false => usual.clone(),
                        };
                        let short = random.one_in(4);
                        let timeout =
                            if short { Duration::from_micros(random.below(2000) as u64) } else { HANG };
                        let (since, before) = (Instant::now(), grants.load(Ordering::SeqCst));
                        let got = pool.checkout_many(&requests, Some(timeout));
                        // A request that starves is served when the others have ended.
                        let others = grants.load(Ordering::SeqCst) - before;
                        let starved = since.elapsed() > LONG && others > MANY;
                        assert!(!starved, "seed {seed}: a request starved; {others} others were granted");
                        let expected = got.is_ok() || short && matches!(got, Err(Error::Timeout(_)));
                        assert!(expected, "seed {seed}: {got:?}");
                        grants.fetch_add(u64::from(got.is_ok()), Ordering::SeqCst);
                        if random.one_in(2) {
                            std::thread::sleep(Duration::from_micros(random.below(300) as u64));
                        }
                        drop(got);
                        if random.one_in(50) {
                            pool.trim(random.below(2 << 20));
                        }
                    }
                });
            }
        });
        pool.check().unwrap();
        assert_eq!(pool.stats().waiting, 0);
    }
}
