//! Contexts: each thread's own, and the same after every call as before.

use pinpool::{Device, Unpinned};

use crate::support::doubles::StandIn;
use crate::support::doubles::npu::{self, on_each};
use crate::{bytes, filled, pool};

/// A server that calls the library directly.
#[derive(Clone, Copy)]
pub struct Server<'a> {
    pub stand_in: &'a StandIn,
}

impl Server<'_> {
    /// The context that is current on this thread. 0: none.
    pub fn current(&self) -> usize {
        let mut current = 0_usize;
        match crate::acl!(self, "aclrtGetCurrentContext", &raw mut current) {
            0 => current,
            code => {
                assert_eq!(code, 107_002);
                0
            }
        }
    }

    pub fn set_current(&self, context: usize) {
        crate::says!(self, 0, "aclrtSetCurrentContext", context);
    }
}

/// Every kind of call there is, with a check of the current context after each.
fn all_calls(device: &Device, look: impl Fn(&str)) {
    let pool = pinpool::Pool::builder(device).capacity(1 << 20).unpinned(Unpinned::Allow).build().unwrap();
    look("a pool");
    let (stream, other) = (device.stream().unwrap(), device.stream().unwrap());
    let memory = device.alloc(10_000).unwrap();
    look("streams and memory");
    let buf = filled(&pool, &bytes(1, 10_000));
    let sent = stream.upload(buf, &memory).unwrap();
    look("an upload");
    other.wait_for(&stream).unwrap();
    look("waiting for a stream");
    let buf = sent.wait().unwrap();
    look("waiting for a copy");
    let back = other.download(&memory, pool.checkout(10_000).unwrap()).unwrap().wait().unwrap();
    assert!(*back == bytes(1, 10_000));
    drop(stream.upload_part(buf, 1..77, memory.slice(3..79)).unwrap());
    look("an upload that is made here");
    stream.upload_blocking(&[7; 100], &memory).unwrap();
    stream.download_blocking(memory.slice(..100), &mut [0; 100]).unwrap();
    look("blocking copies");
    drop(stream.copy(memory.slice(..64), memory.slice(64..128)).unwrap());
    let (from, to) = stream.copy_host(back, pool.checkout(10_000).unwrap()).unwrap();
    from.wait().unwrap();
    to.wait().unwrap();
    look("other copies");
    drop(pool.checkout_zeroed(500).unwrap());
    look("zeros");
    if let Ok(value) = device.register(vec![1_u8; 100_000]) {
        drop(stream.upload(value, memory.slice(..)).err());
    }
    // SAFETY: no other code uses it.
    drop(unsafe { device.raw_memory(memory.address(), 10, memory.clone()) }.unwrap());
    look("registering and raw memory");
    drop(stream.hold(()).unwrap());
    stream.synchronize().unwrap();
    look("holds");
    device.reap();
    assert!(pool.trim(0) > 0);
    look("trimming");
    drop((pool, stream, other, memory));
    look("the end");
}

#[test]
fn the_callers_context_is_put_back() {
    on_each("contexts::the_callers_context_is_put_back", &npu::WAYS, |stand_in| {
        let server = Server { stand_in };
        let device = Device::open("acl:0").unwrap();
        // Opening changes nothing: this thread has no context.
        assert_eq!(server.current(), 0);
        let ours = pinpool::acl::raw_context(&device).unwrap().addr();
        // The context of another device, of the same device, and one that the server made.
        crate::says!(server, 0, "aclrtSetDevice", 1);
        let second = server.current();
        crate::says!(server, 0, "aclrtSetDevice", 0);
        assert_eq!(server.current(), ours);
        let own = crate::made!(server, "aclrtCreateContext", 1);
        for context in [second, ours, own] {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    server.set_current(context);
                    all_calls(&device, |what| assert_eq!(server.current(), context, "{what}"));
                });
            });
        }
        // A thread without a context has the crate's after a call, or none, and can set any.
        std::thread::scope(|scope| {
            scope.spawn(|| {
                all_calls(&device, |what| {
                    let current = server.current();
                    assert!(current == 0 || current == ours, "{what}");
                });
                server.set_current(second);
                all_calls(&device, |what| assert_eq!(server.current(), second, "{what}"));
            });
        });
        drop(device);
        crate::says!(server, 0, "aclrtDestroyContext", own);
        crate::says!(server, 0, "aclrtResetDevice", 0);
        crate::says!(server, 0, "aclrtResetDevice", 1);
    });
}

#[test]
fn handles_may_be_waited_for_and_dropped_anywhere() {
    on_each("contexts::handles_may_be_waited_for_and_dropped_anywhere", &npu::WAYS, |_| {
        let devices = [0, 1].map(|n| Device::open(&format!("acl:{n}")).unwrap());
        let pools = devices.each_ref().map(|device| pool(device, 1 << 20));
        let streams = devices.each_ref().map(|device| device.stream().unwrap());
        let memories = devices.each_ref().map(|device| device.alloc(50_000).unwrap());
        // Submitted by turns on one thread, waited for on threads that have used neither device.
        let mut flights = Vec::new();
        for round in 0..10 {
            let n = round % 2;
            flights.push(streams[n].upload(filled(&pools[n], &bytes(round, 50_000)), &memories[n]).unwrap());
        }
        std::thread::scope(|scope| {
            for (round, flight) in flights.into_iter().enumerate() {
                scope.spawn(move || {
                    if round % 3 == 0 {
                        return drop(flight);
                    }
                    assert!(*flight.wait().unwrap() == bytes(round, 50_000));
                });
            }
        });
        std::thread::spawn(move || drop((pools, streams, memories, devices))).join().unwrap();
    });
}

/// A part of everything, whichever calls of it fail.
fn whatever_fails(
    device: &Device,
    pool: &pinpool::Pool,
    [stream, other]: &[pinpool::Stream; 2],
) -> pinpool::Result<()> {
    let memory = device.alloc(10_000)?;
    for on in [stream, other] {
        let sent = on.upload(filled(pool, &bytes(1, 10_000)), &memory)?.wait();
        // By the CPU alone, and at once.
        drop(on.upload_part(filled(pool, &bytes(1, 10_000)), 1..77, memory.slice(3..79)?)?);
        on.upload_blocking(&[7; 100], &memory)?;
        let (from, to) = on.copy_host(sent?, pool.checkout(10_000)?)?;
        from.wait()?;
        to.wait()?;
    }
    other.wait_for(stream)?;
    drop(pool.checkout_zeroed(500)?);
    // SAFETY: no other code uses it.
    drop(unsafe { device.raw_memory(memory.address() + 64, 10, ()) }?);
    stream.synchronize()
}

#[test]
fn the_callers_context_is_put_back_after_errors_too() {
    on_each("contexts::the_callers_context_is_put_back_after_errors_too", &npu::WAYS, |stand_in| {
        let server = Server { stand_in };
        crate::says!(server, 0, "aclInit", 0);
        crate::says!(server, 0, "aclrtSetDevice", 1);
        let theirs = server.current();
        let device = Device::open("acl:0").unwrap();
        let pool = pinpool::Pool::builder(&device).capacity(1 << 20).build().unwrap();
        // One stream's handle is given out. The calls that destroy the streams are not to fail.
        let streams = [device.stream().unwrap(), device.stream().unwrap()];
        pinpool::acl::raw_stream(&streams[1]).unwrap();
        whatever_fails(&device, &pool, &streams).unwrap();
        assert_eq!(server.current(), theirs);
        let mut failed = 0;
        for (call, count) in stand_in.report().calls {
            // The call that reads the current context, and the one that restores it; calls whose failure may leak; and
            // those that the crate does not make.
            let other =
                ["CurrentContext", "Destroy", "Free", "Reset", "SetDevice", "Init", "Name", "Msg", "standin"];
            if other.iter().any(|part| call.contains(part)) {
                continue;
            }
            for nth in [1, 2, count.div_ceil(2)] {
                stand_in.fail(&call, nth, 507_000, false);
                failed += u64::from(whatever_fails(&device, &pool, &streams).is_err());
                assert_eq!(server.current(), theirs, "{call}, {nth}");
                stand_in.calm();
            }
        }
        assert!(failed > 10, "{failed}");
        drop((pool, streams, device));
        crate::says!(server, 0, "aclrtResetDevice", 1);
    });
}
