//! Memory that is not the pool's own: what the device allocates, what the pool adopts, values that are
//! registered.

use std::ops::Deref;

use pinpool::host::{HostConfig, HostNode};
use pinpool::{Backing, HostAllocFlags};

use super::*;
use crate::scenario::Topic;
use crate::support::skip;
use crate::support::value::Value;

/// What a server does with such memory.
pub const OTHERS: &[Topic] = &[pools, values];
/// What a clean run must have sent there and back: from memory of two backings, and values that are shared,
/// dropped and waited for.
pub const COMPARED: [&str; 5] = ["allocated", "managed", "shared", "dropped", "waited for"];

const PAGE: usize = 64 << 10;
/// Bytes that are sent, which the server's device memory has room for.
const LEN: usize = 30_001;

impl Server<'_> {
    /// A value of these bytes, by a call whose error gives it back as it was.
    fn give<R>(
        &mut self,
        what: &'static str,
        bytes: Vec<u8>,
        call: impl Fn(&Self, Value) -> Result<R, SubmitError<Value>>,
    ) -> Option<R> {
        let content = bytes.clone();
        let value = Value::counted(bytes, &self.report.values);
        let (at, mut value) = (value.as_ptr(), Some(value));
        self.again(what, |s| {
            // Only a value that was kept is missing.
            let given = value.take().ok_or(Error::ZeroLength)?;
            call(s, given).map_err(|refused| {
                let error = &refused.error;
                match &refused.buffer {
                    Some(back) if back.as_ptr() != at || **back != *content => {
                        s.wrong(format!("{what}: the memory came back changed: {error}"));
                    }
                    // A lost device may still reach a part of it.
                    None if what != "adopt" || !error.is_device_lost() => {
                        s.wrong(format!("{what}: the memory was kept: {error}"))
                    }
                    _ => {}
                }
                value = refused.buffer;
                refused.error
            })
        })
    }

    /// What was submitted, unless that failed or is lost.
    fn outcome<B: Lend, L>(&mut self, submitted: Result<InFlight<B>, SubmitError<L>>) -> Option<B> {
        submitted.ok().and_then(|flight| self.settle(flight))
    }

    /// What came back of what was sent. A run with a fault may have sent nothing.
    fn came(
        &mut self,
        what: &'static str,
        sent: bool,
        back: Option<impl Deref<Target = [u8]>>,
        bytes: &[u8],
    ) {
        if let Some(back) = back.filter(|_| sent) {
            self.did(what);
            if *back != *bytes {
                self.wrong(format!("{what}: wrong bytes, reported as done"));
            }
        }
    }
}

/// Pools of memory that the device allocates, and of what is adopted.
fn pools(s: &mut Server<'_>) {
    let flags = HostAllocFlags { portable: true, ..HostAllocFlags::default() };
    // Only a lost device ends it early.
    let _ =
        [Backing::HostAlloc(flags), Backing::Managed].into_iter().try_for_each(|backing| pool_of(s, backing));
}

fn pool_of(s: &mut Server<'_>, backing: Backing) -> Option<()> {
    let memory = s.memory.slice(..LEN).ok()?;
    let pool = s.again("a pool of such memory", |s| {
        let sizes = Pool::builder(&s.device).capacity(8 * PAGE).initial(4 * PAGE).region(4 * PAGE);
        sizes.extent(2 * PAGE).backing(backing).build()
    })?;
    s.again("wait_pinned", |_| pool.wait_pinned(Some(HANG)))?;
    let mut buf = s.again("checkout", |_| pool.checkout_timeout(LEN, HANG))?;
    fill(&mut buf, 1, LEN);
    if buf.is_pinned() != (backing != Backing::Managed) {
        s.wrong("pinned or not");
    }
    s.again("device address", |s| buf.device_address(&s.device))?;
    let sent = s.streams[0].upload(buf, &memory);
    let sent = s.outcome(sent).is_some();
    let landing = s.again("checkout", |_| pool.checkout_timeout(LEN, HANG))?;
    let back = s.streams[0].download(&memory, landing);
    let back = s.outcome(back);
    s.came(COMPARED[usize::from(backing == Backing::Managed)], sent, back, &bytes(1, LEN));
    let held = s.streams[0].hold(());
    s.outcome(held);
    s.device.reap();
    pool.trim(0);
    s.check(&pool);
    let stats = pool.stats();
    if stats.pinned_bytes + stats.unpinned_bytes == 0 {
        s.give("adopt", bytes(2, 5 * PAGE), |_, value| pool.adopt(value))?;
        drop(s.again("checkout", |_| pool.checkout_timeout(PAGE, HANG))?);
        s.check(&pool);
    }
    Some(())
}

/// Values that are registered, there and back: waited for, shared, dropped in flight.
fn values(s: &mut Server<'_>) {
    // Only a lost device ends it early.
    let _ = (0..3).try_for_each(|round| value(s, round));
    let read = s.give("register_read_only", bytes(9, 1000), |s, value| s.device.register_read_only(value));
    if let Some(read) = read {
        let held = s.streams[0].hold(read);
        s.outcome(held);
    }
}

fn value(s: &mut Server<'_>, round: usize) -> Option<()> {
    let memory = s.memory.slice(..LEN).ok()?;
    let content = bytes(round, LEN);
    let value = s.give("register", content.clone(), |s, value| s.device.register(value))?;
    s.again("device address", |s| value.device_address(&s.device))?;
    let sent = match round {
        0 => {
            let sent = s.streams[0].upload(Arc::new(value), &memory);
            s.outcome(sent).is_some()
        }
        1 => {
            let sent = s.streams[0].upload(value, &memory).is_ok();
            resume(s.machine);
            sent
        }
        _ => {
            let sent = s.streams[0].upload(value, &memory);
            let value = s.outcome(sent);
            let sent = value.is_some();
            if value.is_some_and(|value| value.into_inner().is_ok_and(|back| *back != *content)) {
                s.wrong("a value came back changed");
            }
            sent
        }
    };
    let target = s.give("register", vec![0; LEN], |s, value| s.device.register(value))?;
    let back = s.streams[0].download(&memory, target);
    let back = s.outcome(back);
    s.came(COMPARED[2 + round], sent, back, &content);
    Some(())
}

#[test]
fn what_overlaps_is_refused_and_comes_back() {
    let device = Device::on(&HostNode::new(HostConfig::new()).unwrap(), 0).unwrap();
    let value: Arc<[u8]> = bytes(1, 10_000).into();
    let Ok(first) = device.register(value.clone()) else { return skip!("the memlock limit") };
    let refused = device.register(value).unwrap_err();
    assert!(refused.error.to_string().contains("overlaps"), "{}", refused.error);
    let value = refused.buffer.unwrap();
    assert!(*value == *bytes(1, 10_000) && *first == *value);
    assert_eq!(device.stats().registered_bytes, 10_000);
    drop(first.into_inner().unwrap());
    // Those that share a page do not overlap.
    let parts: Vec<_> = (0..100).map(|i| device.register(bytes(i, 100)).unwrap()).collect();
    assert_eq!(device.stats().registered_bytes, 100 * 100);
    drop(parts);
    assert!(device.register(value).is_ok(), "unregistered, it may be registered again");
}
