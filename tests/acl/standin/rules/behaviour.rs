//! How the double itself behaves: late copies, failing calls, errors' texts, what is left, what older ones lack.

use crate::support::doubles::ascendcl::{
    Acl, REPORT, SYNC, acl, again, library, made, older, report_of, says,
};
use crate::support::doubles::{HANG, StandIn, child};
use crate::support::skip;

#[test]
fn copies_are_as_late_as_they_may_be() {
    let Some(a) = Acl::ready() else { return };
    let (stream, other, event) = (a.stream(), a.stream(), a.event());
    let (memory, mut from, to) = (a.memory(64), a.host(256), a.host(256));
    from.fill(1);
    assert_eq!(a.upload(memory, from.at, 64, stream), 0);
    // Too early: the copy reads what is there when it runs.
    from.fill(2);
    says!(a, 0, "aclrtRecordEvent", event, stream);
    says!(a, 0, "aclrtStreamWaitEvent", other, event);
    assert_eq!(a.download(to.at, memory, 64, other), 0);
    assert_eq!(to[..64], [0xA5; 64], "no call has asked yet");
    says!(a, 0, "aclrtSynchronizeStream", other);
    assert_eq!(to[..64], [2; 64]);
    a.broken(&[]);
}

#[test]
fn a_query_says_no_first_and_only_covers_what_came_before() {
    let Some(a) = Acl::ready() else { return };
    let (stream, memory, mut from, mut to) = (a.stream(), a.memory(64), a.host(256), a.host(256));
    from.fill(1);
    to.fill(0);
    let mut refused = 0;
    for _ in 0..20 {
        let event = a.event();
        assert_eq!(a.upload(memory, from.at, 64, stream), 0);
        says!(a, 0, "aclrtRecordEvent", event, stream);
        assert_eq!(a.download(to.at, memory, 64, stream), 0);
        refused += a.wait(event);
        assert_eq!(to[..64], [0; 64], "what came after the event is still to come");
        let mut status = 0_u32;
        says!(a, 0, "aclrtStreamQuery", stream, &raw mut status);
        assert_eq!(status, 1);
        says!(a, 0, "aclrtStreamQuery", stream, &raw mut status);
        assert_eq!((status, to[0]), (0, 1));
        to.fill(0);
    }
    assert!(refused > 0);
    a.broken(&[]);
}

#[test]
fn while_it_hangs_nothing_is_ready_and_time_runs_out() {
    let Some(a) = Acl::ready() else { return };
    let (stream, event) = (a.stream(), a.event());
    says!(a, 0, "aclrtRecordEvent", event, stream);
    a.stand_in.hang(true);
    assert!((0..100).all(|_| !a.is_complete(event)));
    says!(a, 507_046, "aclrtSynchronizeStreamWithTimeout", stream, 1);
    says!(a, 507_047, "aclrtSynchronizeEventWithTimeout", event, 1);
    assert!(a.message().is_some_and(|text| text.contains("aclrtSynchronizeEventWithTimeout")));
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| says!(a, 0, "aclrtSynchronizeEvent", event));
        a.stand_in.hang(false);
        waits.join().expect("it came back");
    });
    assert!(a.is_complete(event));
    a.broken(&[]);
}

#[test]
fn a_device_that_is_lost_stays_lost_until_it_is_reset() {
    let Some(a) = Acl::ready() else { return };
    let (stream, event, memory, to) = (a.stream(), a.event(), a.memory(64), a.host(256));
    assert_eq!(a.download(to.at, memory, 64, stream), 0);
    says!(a, 0, "aclrtRecordEvent", event, stream);
    a.stand_in.fail("aclrtMemcpyAsync", 1, 507_010, false);
    assert_eq!(a.download(to.at, memory, 64, stream), 507_010);
    let mut status = 0_u32;
    says!(a, 507_010, "aclrtQueryEventStatus", event, &raw mut status);
    says!(a, 507_010, "aclrtSynchronizeStream", stream);
    says!(a, 507_010, "aclrtFree", memory);
    assert_eq!(to[..64], [0xA5; 64], "what was queued never ran");
    // The other device is not affected.
    says!(a, 0, "aclrtSetDevice", 1);
    says!(a, 0, "aclrtSynchronizeStream", a.stream());
    says!(a, 0, "aclrtResetDevice", 0);
    says!(a, 0, "aclrtSetDevice", 0);
    a.stream();
    a.stand_in.kill(1, 507_901);
    says!(a, 0, "aclrtSetDevice", 1);
    says!(a, 507_901, "aclrtSynchronizeDevice");
}

#[test]
fn a_call_fails_once_when_told_to() {
    let Some(a) = Acl::ready() else { return };
    a.stand_in.fail("standin_nothing", 2, 507_000, false);
    let codes = [(); 4].map(|()| acl!(a, "standin_nothing"));
    assert_eq!((codes, a.stand_in.struck()), ([0, 507_000, 0, 0], 1));
    // Afterwards: it was done all the same.
    a.stand_in.fail("aclrtMallocHost", 1, 207_001, true);
    let mut at = 0_usize;
    says!(a, 207_001, "aclrtMallocHost", &raw mut at, 64);
    says!(a, 0, "aclrtFreeHost", at);
    a.stand_in.fail("aclrtCreateStream", 1, 207_008, false);
    a.stand_in.calm();
    a.stream();
    a.limit(9, 2);
    a.stream();
    says!(a, 207_008, "aclrtCreateStream", &raw mut at);
    a.broken(&[]);
}

#[test]
fn texts_are_each_threads_own_and_the_latest() {
    let Some(a) = Acl::ready() else { return };
    assert_eq!(a.message(), None);
    let mut at = 0_usize;
    says!(a, 107_001, "aclrtSetDevice", 9);
    says!(a, 100_000, "aclrtMalloc", &raw mut at, 0, 0);
    // A success leaves it, another thread has its own.
    a.stream();
    std::thread::scope(|scope| {
        scope.spawn(|| assert_eq!(a.message(), None));
    });
    let text = a.message().expect("two calls failed");
    assert!(text.contains("100000") && text.contains("aclrtMalloc") && !text.contains("107001"), "{text}");
    assert_eq!(a.message(), None, "once");
    // The next text is in the place of the last one.
    let shown = || unsafe {
        // SAFETY: acl.h has the signature.
        a.stand_in.get::<extern "C" fn() -> *const std::ffi::c_char>("aclGetRecentErrMsg")()
    };
    says!(a, 107_001, "aclrtSetDevice", 9);
    let first = shown();
    says!(a, 107_017, "aclrtDestroyStream", 0x123);
    assert_eq!(shown(), first);
}

#[test]
fn threads_on_two_devices_do_not_meet() {
    let Some(a) = Acl::bare() else { return };
    says!(a, 0, "aclInit", 0);
    std::thread::scope(|scope| {
        for thread in 0..6_u8 {
            let a = &a;
            scope.spawn(move || {
                says!(a, 0, "aclrtSetDevice", usize::from(thread % 2));
                // A context of its own: the default one is destroyed with the last thread that resets the device.
                let own = made!(a, "aclrtCreateContext", usize::from(thread % 2));
                let (stream, event, memory) = (a.stream(), a.event(), a.memory(4096));
                let (mut from, to) = (a.host(8192), a.host(8192));
                for round in 0..40 {
                    from[..4096].fill(thread * 40 + round);
                    assert_eq!(a.upload(memory, from.at, 4096, stream), 0);
                    assert_eq!(a.download(to.at, memory, 4096, stream), 0);
                    says!(a, 0, "aclrtRecordEvent", event, stream);
                    a.wait(event);
                    assert!(to[..4096] == from[..4096]);
                }
                says!(a, 0, "aclrtSynchronizeStream", stream);
                says!(a, 0, "aclrtDestroyEvent", event);
                says!(a, 0, "aclrtDestroyStream", stream);
                says!(a, 0, "aclrtFreeHost", from.at);
                says!(a, 0, "aclrtFreeHost", to.at);
                says!(a, 0, "aclrtFree", memory);
                says!(a, 0, "aclrtDestroyContext", own);
                says!(a, 0, "aclrtResetDevice", usize::from(thread % 2));
            });
        }
    });
    a.broken(&[]);
    let report = a.stand_in.report();
    assert!(report.over && report.leaks.is_empty(), "{report:?}");
}

#[test]
fn handles_come_back_when_told_to() {
    let Some(a) = Acl::ready() else { return };
    let stream = a.stream();
    says!(a, 0, "aclrtDestroyStream", stream);
    assert_ne!(a.stream(), stream);
    a.stand_in.reuse(true);
    assert_eq!(a.stream(), stream);
    says!(a, 0, "aclrtSynchronizeStream", stream);
    a.broken(&[]);
}

#[test]
fn what_is_left_is_reported() {
    let Some(a) = Acl::ready() else { return };
    let default = a.current();
    let own = made!(a, "aclrtCreateContext", 0);
    let (stream, event, memory, host) = (a.stream(), a.event(), a.memory(64), a.host(64));
    let mut pages = super::host::pages(1);
    says!(a, 0, "aclrtHostRegisterV2", pages.as_mut_ptr(), 4096, 0x1000_0000);
    let all =
        ["devices 1", "contexts 1", "streams 1", "events 1", "allocations 1", "hosts 1", "registrations 1"];
    assert_eq!(a.stand_in.report().leaks, all);
    assert!(!a.stand_in.report().over);
    says!(a, 0, "aclrtHostUnregister", pages.as_ptr());
    says!(a, 0, "aclrtFreeHost", host.at);
    says!(a, 0, "aclrtFree", memory);
    says!(a, 0, "aclrtDestroyStream", stream);
    says!(a, 0, "aclrtDestroyContext", own);
    // What is destroyed with its context counts as left, too.
    assert_eq!(a.stand_in.report().leaks, ["devices 1", "events 1"]);
    let mut status = 0_u32;
    says!(a, 107_017, "aclrtQueryEventStatus", event, &raw mut status);
    says!(a, 0, "aclrtSetCurrentContext", default);
    says!(a, 0, "aclrtResetDevice", 0);
    let report = a.stand_in.report();
    assert!(report.over && report.calls.contains(&("aclrtResetDevice".into(), 1)));
    assert_eq!(report.leaks, ["events 1"]);
}

/// In a child: the library is loaded, used and left, and the process ends.
#[test]
fn the_report_is_written_at_the_end() {
    const TEST: &str = "rules::behaviour::the_report_is_written_at_the_end";
    if std::env::var_os(REPORT).is_some() {
        let Some(a) = Acl::bare() else { return };
        made!(a, "aclrtGetDeviceCount");
        says!(a, 0, "aclInit", 0);
        says!(a, 0, "aclrtSetDevice", 1);
        a.host(64);
        // The library stays loaded, as a driver does.
        std::mem::forget(a);
        return;
    }
    let Some(library) = library() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("report");
    let environment =
        [(crate::support::doubles::ascendcl::PATH, library.as_os_str()), (REPORT, path.as_os_str())];
    let environment = environment.map(|(name, value)| (name, value.to_str().expect("a path in UTF-8")));
    let ended = child(TEST, &environment, HANG);
    assert!(ended.status.is_some_and(|s| s.success()), "{}: {}", ended.how(), ended.last_words());
    let report = report_of(&path).expect("it was written");
    assert_eq!(report.violations, ["INIT-1 aclrtGetDeviceCount"]);
    assert_eq!(report.leaks, ["devices 1", "hosts 1"]);
}

/// In a child: the report of a program that has no test in it.
#[test]
fn the_environment_says_what_there_is() {
    const TEST: &str = "rules::behaviour::the_environment_says_what_there_is";
    let environment = [
        ("PINPOOL_STANDIN_DEVICES", "3"),
        ("PINPOOL_STANDIN_MEMORY", "8192"),
        ("PINPOOL_STANDIN_EVENTS", "1"),
        ("PINPOOL_STANDIN_STREAMS", "2"),
        ("PINPOOL_STANDIN_EXTENT", "4096"),
        ("PINPOOL_STANDIN_HOST", "6000"),
        ("PINPOOL_STANDIN_REGISTER", "0"),
        ("PINPOOL_STANDIN_SEGMENTS", "1"),
        ("PINPOOL_STANDIN_FAIL", "aclrtGetRunMode:2:507000"),
    ];
    if std::env::var(environment[0].0).as_deref() != Ok("3") {
        return again(TEST, &environment);
    }
    let Some(a) = Acl::ready() else { return };
    let mut at = 0_usize;
    assert_eq!(made!(a, "aclrtGetDeviceCount") & 0xFFFF_FFFF, 3);
    assert_eq!(made!(a, "aclrtGetRunMode") & 0xFFFF_FFFF, 1);
    says!(a, 507_000, "aclrtGetRunMode", &raw mut at);
    says!(a, 207_001, "aclrtMalloc", &raw mut at, 8193, 0);
    made!(a, "aclrtCreateEventWithFlag", SYNC);
    says!(a, 207_007, "aclrtCreateEventWithFlag", &raw mut at, SYNC);
    says!(a, 207_001, "aclrtMallocHost", &raw mut at, 4097);
    let (stream, memory, host) = (a.stream(), a.memory(64), a.host(4096));
    says!(a, 207_001, "aclrtMallocHost", &raw mut at, 4096);
    let mut pages = super::host::pages(1);
    says!(a, 207_000, "aclrtHostRegisterV2", pages.as_mut_ptr(), 4096, 0x1000_0000);
    assert_eq!(a.upload(memory, host.at, 64, stream), 0);
    assert_eq!(a.upload(memory, host.at + 64, 64, stream), 0);
    a.broken(&["SEG-2"]);
    a.stream();
    says!(a, 207_008, "aclrtCreateStream", &raw mut at);
}

/// In two children: on the device, with a newer driver; and where there is no device.
#[test]
fn the_environment_says_where_it_runs() {
    const TEST: &str = "rules::behaviour::the_environment_says_where_it_runs";
    let (on_device, devices) =
        (std::env::var("PINPOOL_STANDIN_RC"), std::env::var("PINPOOL_STANDIN_DEVICES"));
    if on_device.is_err() && devices.is_err() {
        again(TEST, &[("PINPOOL_STANDIN_RC", "1"), ("PINPOOL_STANDIN_VA", "1")]);
        return again(TEST, &[("PINPOOL_STANDIN_DEVICES", "0")]);
    }
    let Some(a) = Acl::bare() else { return };
    let mut at = 0_usize;
    says!(a, 0, "aclInit", 0);
    if devices.is_ok() {
        says!(a, 207_004, "aclrtGetDeviceCount", &raw mut at);
        says!(a, 107_001, "aclrtSetDevice", 0);
        return a.broken(&[]);
    }
    assert_eq!(made!(a, "aclrtGetRunMode") & 0xFFFF_FFFF, 0);
    says!(a, 0, "aclrtSetDevice", 0);
    // Which, and its value.
    let attribute = [3_u32, 1, 0];
    let config = [attribute.as_ptr() as usize, 1];
    says!(a, 0, "aclrtMallocHostWithCfg", &raw mut at, 64, config.as_ptr());
    a.broken(&[]);
}

#[test]
fn older_libraries_lack_what_came_later() {
    let (Some(of_2022), Some(of_5)) = (older("acl2022"), older("acl5")) else {
        skip!("there is no cargo to build older ones with");
        return;
    };
    let always = [
        "aclInit",
        "aclrtSetDevice",
        "aclrtGetRunMode",
        "aclrtCreateContext",
        "aclrtCreateStream",
        "aclrtSynchronizeStream",
        "aclrtCreateEvent",
        "aclrtRecordEvent",
        "aclrtQueryEvent",
        "aclrtResetEvent",
        "aclrtSynchronizeEvent",
        "aclrtStreamWaitEvent",
        "aclrtMallocHost",
        "aclrtFreeHost",
        "aclrtMalloc",
        "aclrtMemcpyAsync",
        "aclrtMemsetAsync",
        "aclrtGetMemInfo",
        "aclGetRecentErrMsg",
    ];
    let of_the_year = ["aclrtCreateEventWithFlag", "aclrtQueryEventStatus", "aclrtCreateStreamWithConfig"];
    let later = [
        "aclrtStreamQuery",
        "aclrtCreateEventExWithFlag",
        "aclrtSynchronizeStreamWithTimeout",
        "aclrtMallocHostWithCfg",
        "aclrtHostRegister",
        "aclrtHostRegisterV2",
        "aclrtHostUnregister",
        "aclrtPointerGetAttributes",
        "aclrtFreeHostWithDevSync",
        "aclFinalizeReference",
    ];
    let has = |path: &std::path::Path, names: &[&str]| {
        let library = StandIn::any(path).expect("it can be loaded");
        names.iter().filter(|name| library.has(name)).count()
    };
    assert_eq!((has(&of_5, &always), has(&of_5, &of_the_year), has(&of_5, &later)), (19, 0, 0));
    assert_eq!((has(&of_2022, &always), has(&of_2022, &of_the_year), has(&of_2022, &later)), (19, 3, 0));
    let newest = library().expect("it can be built, too");
    assert_eq!((has(&newest, &always), has(&newest, &of_the_year), has(&newest, &later)), (19, 3, 10));
    // Old kinds of copies, and events that are still complete.
    let old = StandIn::load(&of_2022).expect("a stand-in");
    let a = OldAcl { stand_in: old };
    says!(a, 0, "aclInit", 0);
    says!(a, 0, "aclrtSetDevice", 0);
    let (stream, event) = (made!(a, "aclrtCreateStream"), made!(a, "aclrtCreateEventWithFlag", SYNC));
    let (memory, host) = (made!(a, "aclrtMalloc", 64, 0), made!(a, "aclrtMallocHost", 64));
    says!(a, 0, "aclrtMemcpyAsync", memory, 64, host, 64, 1, stream);
    says!(a, 100_000, "aclrtMemcpyAsync", memory, 64, host, 64, 4, stream);
    says!(a, 0, "aclrtRecordEvent", event, stream);
    says!(a, 0, "aclrtSynchronizeEvent", event);
}

/// One that is not the newest has nothing to share with the other tests.
struct OldAcl {
    stand_in: StandIn,
}
