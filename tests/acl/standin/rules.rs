//! Scripts that break each rule of `crates/pinpool-sim/src/rules.rs` and do what is allowed, and show what the library
//! does. See `tests/cuda/standin/script.rs`.

pub const SCRIPTS: &str = "
the library is initialised and ended
    bare
    n = GetDeviceCount ! INIT-1
    100037 aclFinalize ! INIT-4
    0 aclInit 0
    n = GetDeviceCount
    100002 aclInit 0
    100003 aclInit nofile
    0 SetDevice d0
    s = stream
    0 aclFinalize ! INIT-2
    100001 SynchronizeStream s ! INIT-3
    left streams 1
    100037 aclFinalize ! INIT-4
what is passed must be there and must exist
    100000 Malloc 0 64 0 ! ARG-1
    100000 Memcpy m 64 0 64 1 ! ARG-1
    100000 Malloc & 64 8 ! ARG-2
    100000 Malloc & 0 0 ! ARG-2
    100000 CreateEventExWithFlag & 16 ! ARG-2
    100000 HostRegister page 4096 1 & ! ARG-2
    107000 SynchronizeStreamWithTimeout s 0 ! ARG-2
    107001 SetDevice d2
    107001 SetDevice -1
a device is reset as often as it was set
    0 SetDevice d0
    0 ResetDevice d0
    0 ResetDevice d0 ! DEV-1
    left streams 1, events 1, allocations 1, hosts 1
    107002 SynchronizeStream s ! CTX-2
    107002 ResetDevice d0 ! CTX-4
most calls need a context
    0 RecordEvent e s
    elsewhere 107002 GetCurrentContext &
    elsewhere 107002 GetDevice &
    elsewhere 107002 Malloc & 1 0 ! CTX-1
    elsewhere 107002 SynchronizeStream s ! CTX-1
    elsewhere 107002 SynchronizeDevice ! CTX-1
    elsewhere e completes
    elsewhere 0 DestroyEvent e
    elsewhere 0 Free m
    elsewhere 0 FreeHost h
contexts are made and destroyed
    default = GetCurrentContext
    107002 DestroyContext default ! CTX-6
    own = CreateContext d1
    0 GetCurrentContext & -> own
    0 GetDevice & -> d1
    0 DestroyContext own
    107002 DestroyContext own ! CTX-6
    107002 Malloc & 1 0 ! CTX-2
    0 SetCurrentContext default
    m = memory 1
a stream is the current context's
    default = GetCurrentContext
    own = CreateContext d0
    107003 up m h 64 s ! CTX-5
    107003 RecordEvent e s ! CTX-5
    0 SynchronizeStream s
    0 up m h 64 0
    0 RecordEvent e 0
    0 SetCurrentContext default
    0 DestroyStream s
events and memory are their devices'
    0 SetDevice d1
    s = stream
    107003 RecordEvent e s ! CTX-5
    107000 up m h 64 s ! CTX-5
    far = memory 64
    0 up far h 64 s
    far = event
    0 RecordEvent far s
    0 SetDevice d0
    s = stream
    0 StreamWaitEvent s far
    own = CreateContext d0
    s = stream
    0 RecordEvent e s
streams and events are there until they are destroyed
    newer = event
    0 QueryEventStatus newer & -> 1 ! EVT-2
    0 StreamWaitEvent s newer ! EVT-2
    alone = CreateEventExWithFlag 2
    0 RecordEvent alone s
    207000 StreamWaitEvent s alone ! EVT-5
    alone completes
    0 RecordEvent e s
    e completes
    0 RecordEvent e s
    0 RecordEvent e s ! EVT-3
    0 DestroyEvent e ! EVT-4
    107017 DestroyEvent e ! EVT-1
    107017 QueryEventStatus e & ! EVT-1
    fill h 7
    0 up m h 64 s
    0 DestroyStream s ! STR-2
    m is 7
    107017 DestroyStream s ! STR-1
memory is freed once and not in use
    m = memory 256
    107000 Free m+64 ! MEM-7
    0 Free m
    107000 Free m ! MEM-7
    m = memory 64
    0 down h m 64 s
    0 Free m ! MEM-8
    0 SynchronizeStream s
    h is 221
    m = memory 64
    0 up m h 64 s
    0 FreeHost h ! HST-2
    0 SynchronizeStream s
    m is 221
    107000 FreeHost h ! HST-1
    h = host 256
    107000 FreeHost h+64 ! HST-1
    other = stream
    0 up m h 64 s
    0 RecordEvent e s
    e completes
    0 SynchronizeStream other
    0 FreeHost h ! HST-10
    h = host 256
    0 up m h 64 s
    0 SynchronizeDevice
    0 FreeHost h
copies keep to the memory that there is
    m = memory 256
    h = host 512
    107000 up m h 512 s ! MEM-6
    107000 up m+256 h 64 s ! MEM-6
    107000 up m h+448 128 s ! MEM-5
    107000 MemcpyAsync m 64 h 128 1 s ! CPY-8
    107000 Memset m 64 0 128 ! CPY-8
    0 MemcpyAsync m 257 h 64 1 s ! CPY-9
    0 MemcpyAsync h+256 512 m 64 2 s ! CPY-9
    0 MemcpyAsync m+192 64 h 64 1 s
    0 up m h+32 64 s ! CPY-5
    0 down h+8 m+8 64 s ! CPY-5 CPY-5
    0 SynchronizeStream s
    0 Memcpy m+1 3 h+65 3 1
a copy says what it copies
    100000 MemcpyAsync m 64 h 64 8 s ! CPY-1
    0 MemcpyAsync m 64 h 64 4 s
    107000 up h m 64 s ! CPY-2
    107000 Memcpy m 64 h 64 0 ! CPY-2
    207000 MemcpyAsync h 64 h+128 64 4 s ! CPY-3
    0 SynchronizeStream s
    0 Memcpy h 64 h+128 64 0
plain memory is no memory for asynchronous copies
    0 up m page 64 s ! CPY-4
    0 down page+64 m 64 s ! CPY-4
    0 SynchronizeStream s
    m is 219
    page+64 is 1
    0 Memcpy m 64 page 64 1
    m is 1
what is copied at once has no order with what is queued
    fill h 6
    0 up m h 64 s
    m is 165 ! CPY-6
    0 Memset h 64 7 64 ! CPY-6
    0 Memcpy h+128 64 h 64 0
    0 SynchronizeStream s
    m is 7
segments keep their distance
    m = memory 512
    h = host 1024
    0 up m h 512 s
    0 up m h+768 224 s
    0 up m h+768 225 s ! SEG-1
    0 down h+960 m 64 s ! SEG-1
    0 HostRegister page 4096 0 &
    0 up m page+4032 64 s
    0 SynchronizeStream s
    sim segments true
    0 up m h 64 s
    0 up m h+128 33 s
    0 up m h+256 64 s
    0 up m h+256 64 s
    0 up m h+64 1 s ! SEG-2
    0 SynchronizeStream s
    0 up m h+256 64 s
    0 up m h+192 64 s ! SEG-2
memory is registered in whole pages and once
    107000 HostRegister page 0 0 & ! MEM-3
    107000 HostRegister 4096 4096 0 & ! HST-5
    507899 HostRegister page+64 4096 0 & ! REG-1
    507911 HostUnregister page ! MEM-2
    0 HostRegister page 8192 0 & => it
    107000 up m it 64 s ! CPY-7
    507910 HostRegister page+4096 4096 0 & ! MEM-1
    507911 HostUnregister page+4096 ! MEM-2
    0 up m page 64 s
    0 HostUnregister page ! MEM-4
    0 SynchronizeStream s
    m is 221
    big = host 8192
    0 HostRegister big+4032 4096 0 &
    0 FreeHost big ! MEM-4
while it hangs nothing is ready, and memory has an end
    0 RecordEvent e s
    sim hang true
    0 QueryEventStatus e & -> 0
    507046 SynchronizeStreamWithTimeout s 1
    sim hang false
    0 SynchronizeStreamWithTimeout s 1
    e completes
    all = memory 268435392
    207001 Malloc & 64 0
a lost device stays lost until it is reset and the other one lives
    0 down h m 64 s
    0 RecordEvent e s
    sim fail aclrtMemcpyAsync 1 507010 false
    507010 down h m 64 s
    507010 QueryEventStatus e &
    507010 SynchronizeStream s
    507010 Free m
    h is 165
    0 SetDevice d1
    far = stream
    0 SynchronizeStream far
    0 ResetDevice d0 ! DEV-1
    0 SetDevice d0
    s = stream
there may be no device
    bare
    sim devices 0 0
    0 aclInit 0
    207004 GetDeviceCount &
    107001 SetDevice d0
on the device itself host memory is its own and is copied in any way
    bare
    sim rc true
    0 aclInit 0
    0 SetDevice d0
    0 GetRunMode & -> 0
    s = stream
    m = memory 64
    h = host 1024
    0 MemcpyAsync m 64 h+16 64 0 s
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
