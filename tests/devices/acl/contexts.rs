//! Contexts: each thread's own, and the same after every call as before.

use super::*;

#[test]
fn the_callers_context_is_put_back() {
    on_each(&npu::WAYS, |stand_in| {
        let server = server(stand_in);
        let all_calls = |device: &Device, look: &dyn Fn(&str)| failing::a_little_on(device, look).unwrap();
        let device = open(0);
        // Opening changes nothing: this thread has no context.
        assert_eq!(current(&server), 0);
        let ours = acl::raw_context(&device).unwrap().addr();
        // The context of another device, of the same device, and one that the server made.
        server.ok("aclrtSetDevice", &[1]);
        let second = current(&server);
        server.ok("aclrtSetDevice", &[0]);
        assert_eq!(current(&server), ours);
        let own = server.made("aclrtCreateContext", &[1]);
        for context in [second, ours, own] {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    server.ok("aclrtSetCurrentContext", &[context]);
                    all_calls(&device, &|what| assert_eq!(current(&server), context, "{what}"));
                });
            });
        }
        // A thread without a context has the crate's after a call, or none, and can set any.
        std::thread::scope(|scope| {
            scope.spawn(|| {
                all_calls(&device, &|what| {
                    let current = current(&server);
                    assert!(current == 0 || current == ours, "{what}");
                });
                server.ok("aclrtSetCurrentContext", &[second]);
                all_calls(&device, &|what| assert_eq!(current(&server), second, "{what}"));
            });
        });
        drop(device);
        server.ok("aclrtDestroyContext", &[own]);
        server.ok("aclrtResetDevice", &[0]);
        server.ok("aclrtResetDevice", &[1]);
    });
}

/// The server has initialised the library before, and set a device.
#[test]
fn the_callers_context_is_put_back_after_errors_too() {
    for way in npu::WAYS {
        let stand_in = &way.machine();
        let server = server(stand_in);
        server.ok("aclInit", &[0]);
        server.ok("aclrtSetDevice", &[1]);
        let theirs = current(&server);
        let device = open(0);
        failing::a_little_on(&device, &|_| ()).unwrap();
        assert_eq!(current(&server), theirs);
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
                assert_eq!(current(&server), theirs, "{call}, {nth}");
                stand_in.calm();
            }
        }
        assert!(failed > 10, "{failed}");
    }
}
