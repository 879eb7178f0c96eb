//! The simulated library keeps its rules: scripts break each rule of `crates/pinpool-sim/src/rules.rs` once, with what
//! leads up to it. (What is allowed the other tests here do.) See `tests/devices/script.rs`.

use pinpool_sim::acl::Library;

use crate::script::{Script, are_listed, scripts};
use crate::support::doubles::StandIn;

#[test]
fn each_rule_is_broken_by_a_script() {
    for (name, script) in scripts(SCRIPTS) {
        println!("{name}");
        Script::run(StandIn::npus(Library::Today), false, &script);
    }
    let broken = SCRIPTS.lines().filter_map(|line| line.split_once(" ! "));
    are_listed(broken.flat_map(|(_, ids)| ids.split(' ')), 3);
}

const SCRIPTS: &str = "
the library is initialised and ended
    bare
    n = GetDeviceCount ! INIT-1
    100037 aclFinalize ! INIT-4
    0 aclInit 0
    0 SetDevice d0
    s = stream
    0 aclFinalize ! INIT-2
    100001 SynchronizeStream s ! INIT-3
what is passed must be there and must exist
    100000 Malloc 0 64 0 ! ARG-1
    100000 Malloc & 64 8 ! ARG-2
a device is reset as often as it was set
    0 SetDevice d0
    0 ResetDevice d0
    0 ResetDevice d0 ! DEV-1
    107002 SynchronizeStream s ! CTX-2
    107002 ResetDevice d0 ! CTX-4
most calls need a context
    elsewhere 107002 Malloc & 1 0 ! CTX-1
    elsewhere 0 Free m
contexts are made and destroyed
    own = CreateContext d1
    0 DestroyContext own
    107002 DestroyContext own ! CTX-6
a stream is the current context's
    own = CreateContext d0
    107003 up m h 64 s ! CTX-5
memory is its device's
    0 SetDevice d1
    s = stream
    107000 up m h 64 s ! CTX-5
streams and events are there until they are destroyed
    newer = event
    0 StreamWaitEvent s newer ! EVT-2
    alone = CreateEventExWithFlag 2
    0 RecordEvent alone s
    207000 StreamWaitEvent s alone ! EVT-5
    0 RecordEvent e s
    0 RecordEvent e s ! EVT-3
    0 DestroyEvent e ! EVT-4
    107017 DestroyEvent e ! EVT-1
    0 up m h 64 s
    0 DestroyStream s ! STR-2
    107017 DestroyStream s ! STR-1
memory is freed once and not in use
    m = memory 256
    107000 Free m+64 ! MEM-7
    0 down h m 64 s
    0 Free m ! MEM-8
    0 SynchronizeStream s
    m = memory 64
    0 up m h 64 s
    0 FreeHost h ! HST-2
    107000 FreeHost h ! HST-1
    h = host 256
    other = stream
    0 up m h 64 s
    0 RecordEvent e s
    e completes
    0 SynchronizeStream other
    0 FreeHost h ! HST-10
copies keep to the memory that there is
    m = memory 256
    h = host 512
    107000 up m h 512 s ! MEM-6
    107000 up m h+448 128 s ! MEM-5
    107000 MemcpyAsync m 64 h 128 1 s ! CPY-8
    0 MemcpyAsync m 257 h 64 1 s ! CPY-9
    0 up m h+32 64 s ! CPY-5
a copy says what it copies
    100000 MemcpyAsync m 64 h 64 8 s ! CPY-1
    107000 up h m 64 s ! CPY-2
    207000 MemcpyAsync h 64 h+128 64 4 s ! CPY-3
plain memory is no memory for asynchronous copies
    0 up m page 64 s ! CPY-4
what is copied at once has no order with what is queued
    0 up m h 64 s
    0 Memset h 64 7 64 ! CPY-6
segments keep their distance
    m = memory 512
    h = host 1024
    0 up m h+768 224 s
    0 up m h+768 225 s ! SEG-1
    0 SynchronizeStream s
    sim segments true
    0 up m h 64 s
    0 up m h+64 1 s ! SEG-2
memory is registered in whole pages and once
    107000 HostRegister page 0 0 & ! MEM-3
    107000 HostRegister 4096 4096 0 & ! HST-5
    507899 HostRegister page+64 4096 0 & ! REG-1
    507911 HostUnregister page ! MEM-2
    0 HostRegister page 8192 0 & => it
    107000 up m it 64 s ! CPY-7
    507910 HostRegister page+4096 4096 0 & ! MEM-1
    0 up m page 64 s
    0 HostUnregister page ! MEM-4
what is left is told
    own = CreateContext d0
    0 HostRegister page 4096 0 &
    left devices 1, contexts 1, streams 1, events 1, allocations 1, hosts 1, registrations 1
";
