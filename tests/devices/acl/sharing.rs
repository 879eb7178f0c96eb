//! A server's own contexts and streams, beside the crate's.

use std::ffi::c_void;
use std::sync::Arc;

use super::*;

fn handle(word: usize) -> *mut c_void {
    std::ptr::without_provenance_mut(word)
}

#[test]
fn the_default_context_is_recognised() {
    on_each(&npu::WAYS, |server| {
        let device = open(1);
        let context = acl::raw_context(&device).unwrap();
        // SAFETY: the library keeps it for as long as the device is set.
        let adopted = unsafe { acl::adopt_context(context, ()) }.unwrap();
        assert_eq!(adopted.name(), &*npu_name(1));
        assert_eq!(current(server), 0, "adopting changes nothing on this thread");
        // The same device, not another one like it.
        assert!(device.stream().unwrap().wait_for(&adopted.stream().unwrap()).is_ok());
        // SAFETY: its default stream is the context's, and lives as long.
        let default = unsafe { acl::adopt_stream(&device, std::ptr::null_mut(), ()) }.unwrap();
        round_trip(&pool(&device, 1 << 20), &default, &bytes(1, 30_000));
        // SAFETY: refused.
        let null = unsafe { acl::adopt_context(std::ptr::null_mut(), ()) }.unwrap_err();
        assert!(matches!(null, Error::Argument(_)), "{null}");
        let host = Device::open("host:0").unwrap();
        assert!(matches!(acl::raw_context(&host), Err(Error::Unsupported(_))));
        assert!(matches!(acl::raw_stream(&host.stream().unwrap()), Err(Error::Unsupported(_))));
        assert!(matches!(acl::about(&host), Err(Error::Unsupported(_))));
    });
}

#[test]
fn a_servers_own_context_is_worked_in() {
    on_each(&npu::WAYS, |server| {
        server.ok("aclInit", &[0]);
        // Set, so that opening and closing it elsewhere does not destroy what is made there.
        server.ok("aclrtSetDevice", &[1]);
        let own = server.made("aclrtCreateContext", &[1]);
        let stream = server.made("aclrtCreateStream", &[]);
        let keeper = Arc::new(());
        {
            // SAFETY: destroyed after the keeper was dropped.
            let device = unsafe { acl::adopt_context(handle(own), keeper.clone()) }.unwrap();
            assert!(device.name().starts_with(&*npu_name(1)), "{}", device.name());
            assert_eq!(acl::raw_context(&device).unwrap(), handle(own));
            let pool = pool(&device, 1 << 20);
            round_trip(&pool, &device.stream().unwrap(), &bytes(1, 77_777));
            // SAFETY: destroyed below, when nothing is in flight any more.
            let adopted = unsafe { acl::adopt_stream(&device, handle(stream), ()) }.unwrap();
            round_trip(&pool, &adopted, &bytes(2, 50_000));
            assert_eq!(Arc::strong_count(&keeper), 2);
            // The server's own copy from the pool's buffer is late, and the hold on its stream waits for it.
            let (memory, buf) = (device.alloc(4096).unwrap(), filled(&pool, &bytes(3, 4096)));
            let (to, from) = (memory.address() as usize, buf.as_ptr().addr());
            server.ok("aclrtSetCurrentContext", &[own]);
            server.ok("aclrtMemcpyAsync", &[to, 4096, from, 4096, 1, stream]);
            drop(adopted.hold(buf).unwrap().wait().unwrap());
            let mut back = [0; 4096];
            device.stream().unwrap().download_blocking(&memory, &mut back).unwrap();
            assert!(back == *bytes(3, 4096));
        }
        until("the keeper is dropped", || Arc::strong_count(&keeper) == 1);
        server.ok("aclrtSetCurrentContext", &[own]);
        server.ok("aclrtDestroyStream", &[stream]);
        server.ok("aclrtDestroyContext", &[own]);
        server.ok("aclrtResetDevice", &[1]);
    });
}

#[test]
fn a_stream_of_another_context_is_refused() {
    for way in npu::WAYS {
        let server = &way.machine();
        let device = open(1);
        server.ok("aclrtSetDevice", &[1]);
        let own = server.made("aclrtCreateContext", &[1]);
        let stream = server.made("aclrtCreateStream", &[]);
        // SAFETY: refused.
        let refused = unsafe { acl::adopt_stream(&device, handle(stream), ()) }.unwrap_err();
        let Error::Mismatch { what: "a stream", of, with, .. } = &refused else { panic!("{refused}") };
        assert_eq!((&**of, &**with), ("another context", &*npu_name(1)));
        // The crate finds out by trying one call, and tried nothing else.
        let found = server.report();
        assert_eq!(found.violations.len(), 1, "{found:?}");
        assert!(found.violations[0].starts_with("CTX-5"), "{found:?}");
        assert_eq!(current(server), own, "put back after an error, too");
        // The event that it tried with is used again, and given back at the end.
        // SAFETY: refused.
        assert!(unsafe { acl::adopt_stream(&device, handle(stream), ()) }.is_err());
        assert_eq!(calls(server, "aclrtCreateEventExWithFlag"), 1);
        device.close(HANG).unwrap();
        let leaks = server.report().leaks;
        assert!(!leaks.iter().any(|leak| leak.starts_with("events")), "{leaks:?}");
    }
}

#[test]
fn the_callers_context_is_put_back() {
    on_each(&npu::WAYS, |server| {
        let device = open(0);
        // Opening changes nothing: this thread has no context.
        assert_eq!(current(server), 0);
        let ours = acl::raw_context(&device).unwrap().addr();
        // The context of another device, of the same device, and one that the server made.
        server.ok("aclrtSetDevice", &[1]);
        let second = current(server);
        server.ok("aclrtSetDevice", &[0]);
        assert_eq!(current(server), ours);
        let own = server.made("aclrtCreateContext", &[1]);
        for context in [second, ours, own, 0] {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    // What a call does not put back the later ones take for the caller's. A thread
                    // without a context has the crate's then, or none, and can set any.
                    for context in [context, second] {
                        if context != 0 {
                            server.ok("aclrtSetCurrentContext", &[context]);
                        }
                        failing::a_little_on(&device).unwrap();
                        let now = current(server);
                        assert!(now == context || context == 0 && now == ours, "{now}");
                    }
                });
            });
        }
        drop(device);
        server.ok("aclrtDestroyContext", &[own]);
        server.ok("aclrtResetDevice", &[0]);
        server.ok("aclrtResetDevice", &[1]);
    });
}
