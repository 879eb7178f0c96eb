//! Fairness, with threads and a clock: a request does not starve beside others that come and go.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pinpool::{Device, Error, Pool, Request, Unpinned};

use crate::support::{HANG, Random, variable};

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

/// How long a request may wait while others, none of which keeps its buffers for long, are granted so many.
const LONG: Duration = Duration::from_millis(1500);
const MANY: u64 = 2000;

#[test]
fn no_request_starves_beside_others_that_come_and_go() {
    let device = Device::open("host").unwrap();
    let end = Instant::now() + Duration::from_secs(variable("PINPOOL_LIVENESS_SECONDS", 3));
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
