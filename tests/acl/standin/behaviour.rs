//! How the simulation behaves beside its rules: late copies, limits, failing calls, texts, older libraries.

use std::time::Duration;

use pinpool_sim::acl::Library;

use super::{Script, run_all, scripts};
use crate::support::doubles::ascendcl::{PATH, REPORT, report_of};
use crate::support::doubles::{HANG, SETUP, child};
use crate::{message, simulation};

const BEHAVIOUR: &str = "
a copy reads what is there when a call finds out about it
    to = host 256
    fill h 1
    0 up m h 64 s
    fill h 2
    other = stream
    0 RecordEvent e s
    0 StreamWaitEvent other e
    0 down to m 64 other
    to is 0xA5
    0 SynchronizeStream other
    to is 2
an event covers what came before it
    to = host 256
    fill h 1
    0 up m h 64 s
    0 RecordEvent e s
    0 down to m 64 s
    e completes
    to is 0xA5
    0 SynchronizeStream s
    to is 1
while it hangs nothing is ready
    0 RecordEvent e s
    sim hang true
    0 QueryEventStatus e & -> 0
    507046 SynchronizeStreamWithTimeout s 1
    sim hang false
    0 SynchronizeStreamWithTimeout s 1
    e completes
a lost device stays lost until it is reset, and the other one lives
    0 down h m 64 s
    0 RecordEvent e s
    sim fail aclrtMemcpyAsync 1 507010 false
    507010 down h m 64 s
    507010 QueryEventStatus e &
    507010 SynchronizeStream s
    507010 Free m
    h is 0xA5
    0 SetDevice d1
    far = stream
    0 SynchronizeStream far
    0 ResetDevice d0 ! DEV-1
    0 SetDevice d0
    s = stream
    sim kill 1 507901
    0 SetDevice d1
    507901 SynchronizeDevice
a call fails once when it is told to, before or after its work
    sim fail aclrtGetRunMode 2 507000 false
    0 GetRunMode & -> 1
    507000 GetRunMode &
    0 GetRunMode & -> 1
    sim fail aclrtMallocHost 1 207001 true
    207001 MallocHost & 64
    0 FreeHost it
    sim fail aclrtCreateStream 1 207008 false
    sim calm
    s = stream
what there is has limits
    sim limit 2
    other = stream
    207008 CreateStream &
    0 Free m
    all = memory 268435456
    207001 Malloc & 1 0
    sim host 1048576 2097408
    207001 MallocHost & 1048577
    one = host 1048576
    two = host 1048576
    207001 MallocHost & 1
    0 FreeHost one
    two = host 1048576
    sim registers false
    207000 HostRegister page 4096 0 &
there may be no device
    bare
    sim devices 0 0
    0 aclInit 0
    207004 GetDeviceCount &
    107001 SetDevice d0
on the device itself host memory is its own, and is copied in any way
    bare
    sim rc true
    0 aclInit 0
    0 SetDevice d0
    0 GetRunMode & -> 0
    s = stream
    m = memory 64
    h = host 1024
    0 MemcpyAsync m 64 h+16 64 0 s
    0 MemcpyAsync m 64 h+16 64 1 s
    0 MemcpyAsync m 64 h+16 64 2 s
    0 MemcpyAsync h+16 64 h+144 64 3 s
    0 up m h 64 s ! CPY-5
    207001 Malloc & 268434369 0
    207000 HostRegister page 4096 0 &
what is left is told
    own = CreateContext d0
    0 HostRegister page 4096 0 &
    left devices 1, contexts 1, streams 1, events 1, allocations 1, hosts 1, registrations 1
    0 HostUnregister page
    0 FreeHost h
    0 Free m
    e = event
    0 DestroyContext own
    left devices 1, streams 1, events 2
";

#[test]
fn it_behaves_as_its_page_says() {
    run_all(&scripts(BEHAVIOUR));
}

#[test]
fn a_call_that_waits_goes_on_when_the_hang_is_over() {
    let mut script = Script::ready();
    script.run("fill h 3\n0 up m h 64 s\nsim hang true");
    let stand_in = script.stand_in.clone();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(20));
            stand_in.hang(false);
        });
        script.run("0 SynchronizeStream s\nm is 3");
    });
}

#[test]
fn texts_are_each_threads_own_and_the_latest() {
    let mut script = Script::ready();
    assert_eq!(message(&script.stand_in), None);
    // A success leaves it, and another thread has its own.
    script.run("107001 SetDevice d2\n100000 Malloc & 0 0 ! ARG-2\ns = stream");
    std::thread::scope(|scope| drop(scope.spawn(|| assert_eq!(message(&script.stand_in), None))));
    let text = message(&script.stand_in).expect("two calls failed");
    assert!(text.contains("100000") && text.contains("aclrtMalloc") && !text.contains("107001"), "{text}");
    assert_eq!(message(&script.stand_in), None, "once");
    // The next text is in the place of the last one.
    let shown = |script: &Script| script.entry("aclGetRecentErrMsg", &[]);
    script.run("107001 SetDevice d2");
    let first = shown(&script);
    script.run("107001 SetDevice -1");
    assert_eq!(shown(&script), first);
}

#[test]
fn older_libraries_lack_what_came_later() {
    let has = |library: Library, names: &[&str]| names.iter().all(|name| library.symbol(name).is_some());
    let lacks = |library: Library, names: &[&str]| names.iter().all(|name| library.symbol(name).is_none());
    let later = ["aclrtHostRegister", "aclrtHostUnregister", "aclrtPointerGetAttributes"];
    let always = ["aclInit", "aclrtCreateEventExWithFlag", "aclrtMallocHost", "aclrtMemcpyAsync"];
    assert!(has(Library::Of2024, &always) && lacks(Library::Of2024, &later));
    assert!(has(Library::Today, &always) && has(Library::Today, &later));
}

/// In a child that loads an older library by its path, on a machine that the environment describes. The library
/// writes its report when the child ends.
#[test]
fn a_library_is_set_up_when_it_is_loaded_and_reports_at_the_end() {
    const TEST: &str = "behaviour::a_library_is_set_up_when_it_is_loaded_and_reports_at_the_end";
    if std::env::var_os(SETUP).is_some() {
        let mut script = Script::bare();
        assert!(script.stand_in.has("aclrtMallocHost") && !script.stand_in.has("aclrtHostRegister"));
        script.run(
            "n = GetDeviceCount ! INIT-1\n0 aclInit 0\n0 GetDeviceCount & -> 3\n507000 GetRunMode &\n0 SetDevice d1\n\
             207001 Malloc & 8193 0\nm = memory 64\nh = host 64\ns = stream\n0 SetDevice 1\n\
             100000 MemcpyAsync m 64 h 64 4 s ! CPY-1",
        );
        // The library stays loaded, as a driver does.
        return std::mem::forget(script);
    }
    let Some(library) = simulation() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("report");
    let environment = [
        (PATH, &*library),
        (REPORT, path.to_str().expect("a path in UTF-8")),
        (SETUP, "library Of2024;devices 3 8192;fail aclrtGetRunMode 1 507000 false"),
    ];
    let ended = child(TEST, &environment, HANG);
    assert!(ended.status.is_some_and(|s| s.success()), "{}: {}", ended.how(), ended.last_words());
    let report = report_of(&path).expect("it was written");
    assert_eq!(
        report.violations,
        ["INIT-1 aclrtGetDeviceCount: before aclInit", "CPY-1 aclrtMemcpyAsync: kind 4"]
    );
    assert_eq!(report.leaks, ["devices 2", "streams 1", "allocations 1", "hosts 1"]);
}
