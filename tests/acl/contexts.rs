//! Contexts: each thread's own, and the same after every call as before.

use super::*;

/// A server that calls the library directly.
#[derive(Clone, Copy)]
pub struct Server<'a> {
    pub stand_in: &'a StandIn,
}

impl Server<'_> {
    /// The context that is current on this thread. 0: none.
    pub fn current(&self) -> usize {
        let mut current = 0_usize;
        match acl!(self, "aclrtGetCurrentContext", &raw mut current) {
            0 => current,
            code => {
                assert_eq!(code, 107_002);
                0
            }
        }
    }

    pub fn set_current(&self, context: usize) {
        says!(self, 0, "aclrtSetCurrentContext", context);
    }
}

#[test]
fn the_callers_context_is_put_back() {
    on_each(&npu::WAYS, |stand_in| {
        let server = Server { stand_in };
        let all_calls = |device: &Device, look: &dyn Fn(&str)| failing::a_little_on(device, look).unwrap();
        let device = open(0);
        // Opening changes nothing: this thread has no context.
        assert_eq!(server.current(), 0);
        let ours = acl::raw_context(&device).unwrap().addr();
        // The context of another device, of the same device, and one that the server made.
        says!(server, 0, "aclrtSetDevice", 1);
        let second = server.current();
        says!(server, 0, "aclrtSetDevice", 0);
        assert_eq!(server.current(), ours);
        let own = made!(server, "aclrtCreateContext", 1);
        for context in [second, ours, own] {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    server.set_current(context);
                    all_calls(&device, &|what| assert_eq!(server.current(), context, "{what}"));
                });
            });
        }
        // A thread without a context has the crate's after a call, or none, and can set any.
        std::thread::scope(|scope| {
            scope.spawn(|| {
                all_calls(&device, &|what| {
                    let current = server.current();
                    assert!(current == 0 || current == ours, "{what}");
                });
                server.set_current(second);
                all_calls(&device, &|what| assert_eq!(server.current(), second, "{what}"));
            });
        });
        drop(device);
        says!(server, 0, "aclrtDestroyContext", own);
        says!(server, 0, "aclrtResetDevice", 0);
        says!(server, 0, "aclrtResetDevice", 1);
    });
}

#[test]
fn handles_may_be_waited_for_and_dropped_anywhere() {
    on_each(&npu::WAYS, |_| {
        let devices = [open(0), open(1)];
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

#[test]
fn the_callers_context_is_put_back_after_errors_too() {
    for way in npu::WAYS {
        let stand_in = &way.machine();
        let server = Server { stand_in };
        says!(server, 0, "aclInit", 0);
        says!(server, 0, "aclrtSetDevice", 1);
        let theirs = server.current();
        let device = open(0);
        failing::a_little_on(&device, &|_| ()).unwrap();
        assert_eq!(server.current(), theirs);
        let mut failed = 0;
        for (call, count) in stand_in.report().calls {
            // The call that reads the current context, and the one that restores it; and those that are not made here.
            let other = ["CurrentContext", "SetDevice", "Init", "Name", "Msg"];
            if other.iter().any(|part| call.contains(part)) {
                continue;
            }
            for nth in [1, 2, count.div_ceil(2)] {
                stand_in.fail(&call, nth, 507_000, false);
                failed += u64::from(failing::a_little_on(&device, &|_| ()).is_err());
                assert_eq!(server.current(), theirs, "{call}, {nth}");
                stand_in.calm();
            }
        }
        assert!(failed > 10, "{failed}");
    }
}
