//! Where host memory comes from, on the host device: every device call fails once, in every way, and nothing is lost.
//!
//! One scenario makes pools of memory that the device allocates, adopts memory and registers values. It is run once
//! without faults, and the calls that it makes are recorded; then again for each of these calls and each kind of
//! failure. After each run nothing panicked or hung, memory that was refused came back as it was, what was reported as
//! complete holds the right bytes, each value was dropped once or is leaked because the failing call was to release it,
//! and the device has everything back. `faults` does the same for what a pool does with its own memory.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use memmap2::MmapMut;
use pinpool::host::{Call, HostConfig, HostNode, HostUsage};
use pinpool::{Backing, Device, Error, HostAllocFlags, InFlight, Lend, Pool, Result, SubmitError, Unpinned};

use super::HANG;
use super::site::{fail, settle};
use crate::support::doubles::Report;
use crate::support::doubles::gpu::until;
use crate::support::hand::{Failure, Machine};
use crate::support::value::Value;
use crate::support::{bytes, panicking, skip};

const PAGE: usize = 64 << 10;

struct User {
    node: HostNode,
    wrong: Vec<String>,
    /// Values that exist.
    there: Arc<AtomicUsize>,
}

impl User {
    fn wrong(&mut self, text: impl Into<String>) {
        self.wrong.push(text.into());
    }

    /// Tries twice. With one fault in a run, only a lost device fails twice.
    fn again<R>(&mut self, what: &str, mut call: impl FnMut() -> Result<R>) -> Option<R> {
        let mut last = None;
        for _ in 0..2 {
            match call() {
                Ok(value) => return Some(value),
                Err(error) if error.is_device_lost() => return None,
                Err(error) => last = Some(error),
            }
            self.node.resume(0);
        }
        self.wrong(format!("{what} failed twice: {last:?}"));
        None
    }

    /// The same for a call whose error gives the memory back, as it was.
    fn give<R>(
        &mut self,
        what: &str,
        memory: Value,
        mut call: impl FnMut(Value) -> Result<R, SubmitError<Value>>,
    ) -> Option<R> {
        let (at, content) = (memory.as_ptr(), memory.to_vec());
        let mut memory = Some(memory);
        for _ in 0..2 {
            match call(memory.take()?) {
                Ok(value) => return Some(value),
                Err(SubmitError { error, buffer: Some(back) }) => {
                    if back.as_ptr() != at || *back != *content {
                        self.wrong(format!("{what}: the memory came back changed"));
                    }
                    if error.is_device_lost() {
                        return None;
                    }
                    memory = Some(back);
                }
                Err(SubmitError { error, buffer: None }) => {
                    self.wrong(format!("{what}: the memory was kept: {error}"));
                    return None;
                }
            }
        }
        self.wrong(format!("{what} failed twice"));
        None
    }

    /// The result of a submission: the value, or nothing where it failed. `None`: the device is lost.
    fn outcome<B: Lend, L>(&mut self, submitted: Result<InFlight<B>, SubmitError<L>>) -> Option<Option<B>> {
        match submitted {
            Ok(flight) => settle(flight, || self.node.resume(0), &mut self.wrong).map(Some),
            Err(refused) => (!refused.error.is_device_lost()).then_some(None),
        }
    }

    /// Pools of memory that the device allocates, and of what is adopted.
    fn pools(&mut self, device: &Device) -> Option<()> {
        let flags = HostAllocFlags { portable: true, mapped: false, write_combined: false };
        let stream = self.again("stream", || device.stream())?;
        let memory = self.again("alloc", || device.alloc(PAGE))?;
        for backing in [Backing::HostAlloc(flags), Backing::Managed] {
            let pool = self.again("build", || {
                let pool = Pool::builder(device).capacity(8 * PAGE).initial(4 * PAGE).region(4 * PAGE);
                pool.extent(2 * PAGE).backing(backing).build()
            })?;
            self.again("wait_pinned", || pool.wait_pinned(Some(HANG)))?;
            let mut buf = self.again("checkout", || pool.checkout_timeout(PAGE, HANG))?;
            buf.extend_from_slice(&bytes(1, PAGE));
            if buf.is_pinned() != (backing != Backing::Managed) {
                self.wrong("pinned or not");
            }
            self.again("device_address", || buf.device_address(device))?;
            let sent = self.outcome(stream.upload(buf, &memory))?.is_some();
            let landing = self.again("checkout", || pool.checkout_timeout(PAGE, HANG))?;
            if let Some(back) = self.outcome(stream.download(&memory, landing))? {
                if sent && *back != *bytes(1, PAGE) {
                    self.wrong("wrong bytes, reported as done");
                }
            }
            self.outcome(stream.hold(()))?;
            device.reap();
            pool.trim(0);
            if let Err(error) = pool.check() {
                self.wrong(error);
            }
            let stats = pool.stats();
            if stats.pinned_bytes + stats.unpinned_bytes == 0 {
                let value = Value::counted(bytes(2, 5 * PAGE), &self.there);
                self.give("adopt", value, |value| pool.adopt(value))?;
                drop(self.again("checkout", || pool.checkout_timeout(PAGE, HANG))?);
                if let Err(error) = pool.check() {
                    self.wrong(error);
                }
            }
        }
        Some(())
    }

    /// Values that are registered, there and back.
    fn values(&mut self, device: &Device) -> Option<()> {
        let stream = self.again("stream", || device.stream())?;
        let memory = self.again("alloc", || device.alloc(30_001))?;
        for round in 0..3 {
            let content = bytes(round, 30_001);
            let value = Value::counted(content.clone(), &self.there);
            let value = self.give("register", value, |value| device.register(value))?;
            self.again("device_address", || value.device_address(device))?;
            let sent = match round {
                0 => self.outcome(stream.upload(Arc::new(value), &memory))?.is_some(),
                1 => {
                    // Dropped in flight.
                    let sent = stream.upload(value, &memory);
                    self.node.resume(0);
                    sent.is_ok()
                }
                _ => match self.outcome(stream.upload(value, &memory))? {
                    Some(value) => {
                        if let Ok(back) = value.into_inner() {
                            if *back != *content {
                                self.wrong("a value came back changed");
                            }
                        }
                        true
                    }
                    None => false,
                },
            };
            let value = Value::counted(vec![0; 30_001], &self.there);
            let target = self.give("register", value, |value| device.register(value))?;
            if let Some(back) = self.outcome(stream.download(&memory, target))? {
                if sent && *back != *content {
                    self.wrong("wrong bytes, reported as done");
                }
            }
        }
        let value = Value::counted(bytes(9, 1000), &self.there);
        let value = self.give("register_read_only", value, |value| device.register_read_only(value))?;
        self.outcome(stream.hold(value))?;
        self.outcome(stream.hold(()))?;
        Some(())
    }
}

/// A node whose limits are not the system's: with too low a memlock limit the scenario cannot run.
fn node() -> HostNode {
    HostNode::new(HostConfig::new().memory(4 << 20)).unwrap()
}

/// A run with one call failing. Returns what is wrong with it.
fn run(node: &HostNode, failed: Option<(Call, Failure)>) -> Vec<String> {
    let there = Arc::new(AtomicUsize::new(0));
    let mut user = User { node: node.clone(), wrong: Vec::new(), there: there.clone() };
    let done = catch_unwind(AssertUnwindSafe(|| {
        let device = Device::on(node, 0).unwrap();
        if user.pools(&device).is_some() {
            user.values(&device);
        }
        device.lost().is_some()
    }));
    let struck = node.clear_faults() == 0;
    node.resume(0);
    let Ok(lost) = done else { return vec!["a panic".into()] };
    let mut wrong = user.wrong;
    let failed = failed.filter(|_| struck);
    if lost && failed.is_none_or(|f| f.1 != Failure::DeviceLost) {
        wrong.push("the device counts as lost without a reason".into());
    }
    let fails = |call: Call| failed.is_some_and(|f| f.0 == call && f.1 != Failure::Stall);
    let allowed = |left: HostUsage| {
        (left.streams == 0 || fails(Call::DestroyStream) && left.streams == 1)
            // What a lost device had in flight is kept for good.
            && (left.events == 0 || fails(Call::DestroyEvent) && left.events == 1 || lost)
            && (left.allocations == 0 || fails(Call::Free) && left.allocations == 1 || lost)
            && (left.pinned_bytes == 0 || fails(Call::Unpin) || fails(Call::FreeHost) || lost)
            && (left.host_bytes == 0 || fails(Call::FreeHost) && left.host_bytes == 2 * PAGE || lost)
            && left.queued == 0
    };
    let kept = usize::from(fails(Call::Unpin));
    let since = Instant::now();
    // With threads the last things are given back a little later.
    while !(allowed(node.live(0)) && (there.load(Ordering::SeqCst) <= kept || lost)) {
        if since.elapsed() > HANG {
            let there = there.load(Ordering::SeqCst);
            wrong.push(format!("left on the device: {:?}, and {there} values", node.live(0)));
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    wrong
}

#[test]
fn every_call_fails_once() {
    panicking::install_if_asked();
    // The system decides how much may be locked.
    let probe = Device::on(&node(), 0).unwrap().register(vec![0; 1 << 20]);
    if let Err(SubmitError { error: Error::MemLock { .. }, .. }) = probe {
        skip!("the memlock limit is used up");
        return;
    }
    drop(probe);
    let clean = node();
    clean.start_trace();
    assert_eq!(run(&clean, None), Vec::<String>::new(), "without any fault");
    let trace = clean.trace();
    let mut counts: Vec<(Call, u64)> = Vec::new();
    for call in Call::ALL {
        let count = trace.iter().filter(|c| **c == call).count() as u64;
        // These calls have nothing to do with host memory; `faults` and `core` have them.
        let others = [Call::CopyBlocking, Call::WaitEvent, Call::Examine, Call::Launch];
        assert!(count > 0 || others.contains(&call), "{call:?} is never made");
        // Calls interleave, so which of them fails varies.
        counts.push((call, count));
    }
    let (mut runs, mut findings) = (0, Vec::new());
    for (call, count) in counts {
        for nth in 0..count {
            for failure in Failure::ALL {
                let node = node();
                fail(&node, call, nth, failure);
                runs += 1;
                let wrong = run(&node, Some((call, failure)));
                findings.extend(wrong.into_iter().map(|w| format!("{call:?} {nth} {failure:?}: {w}")));
                assert!(findings.len() < 20, "{findings:#?}");
            }
        }
    }
    println!("{runs} runs");
    assert!(findings.is_empty(), "{findings:#?}");
}

#[test]
fn what_overlaps_is_refused_and_comes_back() {
    let node = node();
    let (device, other) = (Device::on(&node, 0).unwrap(), Device::open("host").unwrap());
    let value: Arc<[u8]> = bytes(1, 10_000).into();
    let Ok(first) = device.register(value.clone()) else { return skip!("the memlock limit") };
    let refused = device.register(value).unwrap_err();
    assert!(refused.error.to_string().contains("overlaps"), "{}", refused.error);
    let value = refused.buffer.unwrap();
    assert!(*value == *bytes(1, 10_000) && *first == *value);
    assert_eq!(device.registered_bytes(), 10_000);
    drop(first.into_inner().unwrap());
    // Two that share a page do not overlap.
    let mut parts: Vec<Box<[u8]>> = (0..100).map(|i| bytes(i, 100).into()).collect();
    parts.sort_by_key(|p| p.as_ptr());
    let parts: Vec<_> = parts.into_iter().map(|p| device.register(p).unwrap()).collect();
    assert_eq!(device.registered_bytes(), 100 * 100);
    drop(parts);
    // A pool's own buffers are pinned already, for every device of the pool.
    let (stream, memory) = (other.stream().unwrap(), other.alloc(10_000).unwrap());
    let again = device.register(value).unwrap();
    let again = stream.upload(again, &memory).unwrap().wait().unwrap();
    assert!(*again == *bytes(1, 10_000), "any device of the family may use it");
}

#[test]
fn plain_memory_takes_its_place_only_where_that_is_allowed() {
    // By hand, since a pool tries again to pin what it could not.
    let machine = Machine::new(1, 4 << 20, 5);
    let device = machine.device(0);
    let fault = |call| machine.fault(call, 1, Failure::Transient);
    let builder = || {
        let pool = Pool::builder(&device).capacity(4 * PAGE).initial(2 * PAGE).extent(2 * PAGE);
        pool.backing(Backing::HostAlloc(HostAllocFlags::default()))
    };
    fault("cuMemHostAlloc");
    assert!(builder().build().unwrap_err().is_retryable());
    fault("cuMemHostAlloc");
    let pool = builder().unpinned(Unpinned::Allow).build().unwrap();
    assert_eq!((pool.stats().pinned_bytes, pool.stats().unpinned_bytes), (0, 2 * PAGE));
    fault("cuMemHostRegister_v2");
    let info = pool.adopt(vec![0; 2 * PAGE]).unwrap();
    assert_eq!((info.pinned, pool.stats().unpinned_bytes), (0, 2 * PAGE + info.len));
    let left = Report::parse(&machine.report()).leaks;
    assert_eq!(left, ["contexts 1"], "nothing is pinned");
    assert_eq!(pool.trim(0), 2 * PAGE + info.len);
    pool.check().unwrap();
}

/// Of two extents that went unpinned the driver then refuses the first for good.
#[test]
fn memory_that_can_never_be_pinned_keeps_no_other_memory_unpinned() {
    let node = node();
    let device = Device::on(&node, 0).unwrap();
    let pool = Pool::builder(&device).capacity(4 * PAGE).initial(0).extent(2 * PAGE);
    let pool = pool.unpinned(Unpinned::Allow).build().unwrap();
    // Both are refused before the memory is adopted, and so before either is tried again.
    for failure in [Failure::Transient, Failure::Transient, Failure::Argument] {
        fail(&node, Call::Pin, 0, failure);
    }
    let info = pool.adopt(MmapMut::map_anon(4 * PAGE).unwrap()).unwrap();
    assert_eq!((info.len, info.pinned), (4 * PAGE, 0));
    until("one of the two is pinned", || pool.stats().pinned_bytes == 2 * PAGE);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!((pool.stats().pinned_bytes, pool.stats().unpinned_bytes), (2 * PAGE, 2 * PAGE));
    pool.check().unwrap();
    assert_eq!(pool.trim(0), 4 * PAGE);
    drop((pool, device));
    until("all is given back", || node.live(0) == HostUsage::default());
}

#[test]
fn adopting_and_trimming_go_on_while_others_check_out() {
    let node = node();
    let device = Device::on(&node, 0).unwrap();
    let pool = Pool::builder(&device).capacity(24 * PAGE).initial(0).region(2 * PAGE).extent(2 * PAGE);
    let pool = pool.unpinned(Unpinned::Allow).build().unwrap();
    let there = Arc::new(AtomicUsize::new(0));
    let (adopted, refused) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let (pool, there, adopted, refused) = (&pool, &there, &adopted, &refused);
            scope.spawn(move || {
                for round in 0..100 {
                    let len = (1 + (round + thread) % 7) * PAGE;
                    let content = bytes(round, len);
                    match pool.adopt(Value::counted(content.clone(), there)) {
                        Ok(info) => {
                            assert!(info.len >= len - PAGE);
                            adopted.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(back) => {
                            let full = matches!(back.error, Error::Exhausted(_));
                            let small = matches!(
                                &back.error,
                                Error::Argument(text) if text.contains("no whole page")
                            );
                            assert!(full || small, "{}", back.error);
                            assert!(*back.buffer.unwrap() == *content);
                            refused.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                    if round % 3 == 0 {
                        pool.trim(4 * PAGE);
                    }
                }
            });
            scope.spawn(move || {
                for round in 0..400 {
                    let len = 1000 + round * 97 % PAGE;
                    let mut buf = pool.checkout_timeout(len, HANG).unwrap();
                    buf.extend_from_slice(&bytes(round, len));
                    std::thread::yield_now();
                    assert!(*buf == *bytes(round, len), "another owner has the same memory");
                }
            });
        }
        scope.spawn(|| {
            for _ in 0..50 {
                pool.check().unwrap();
                let stats = pool.stats();
                assert!(stats.pinned_bytes + stats.unpinned_bytes <= 24 * PAGE, "{stats:?}");
                std::thread::yield_now();
            }
        });
    });
    println!("{adopted:?} adopted, {refused:?} refused");
    assert!(adopted.into_inner() > 0);
    pool.trim(0);
    let (stats, pinning) = (pool.stats(), pool.pinning());
    assert_eq!((stats.pinned_bytes + stats.unpinned_bytes, pinning.wanted, pinning.ready), (0, 0, 0));
    drop((pool, device));
    until("all is given back", || (there.load(Ordering::SeqCst), node.live(0)) == (0, HostUsage::default()));
}
