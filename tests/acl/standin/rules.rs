//! The rules by the ids of the simulation's page, each with a script that breaks it and does what is allowed.

/// See the page of the folder.
pub const RULES: &str = "
INIT-1
    bare
    n = GetDeviceCount ! INIT-1
    0 aclInit 0
    n = GetDeviceCount
    100002 aclInit 0
    100003 aclInit nofile
INIT-2
    0 aclFinalize ! INIT-2
    0 aclInit 0
    0 SetDevice d0
INIT-3
    0 aclFinalize ! INIT-2
    100001 SynchronizeStream s ! INIT-3
    left streams 1, events 1, allocations 1, hosts 1
INIT-4
    bare
    100037 aclFinalize ! INIT-4
    0 aclInit 0
    0 aclFinalize ! INIT-2
    100037 aclFinalize ! INIT-4
ARG-1
    100000 Malloc 0 64 0 ! ARG-1
    100000 MallocHost 0 64 ! ARG-1
    100000 GetDeviceCount 0 ! ARG-1
    100000 CreateStream 0 ! ARG-1
    100000 SetCurrentContext 0 ! ARG-1
    100000 DestroyStream 0 ! ARG-1
    100000 DestroyEvent 0 ! ARG-1
    100000 FreeHost 0 ! ARG-1
    100000 Memcpy m 64 0 64 1 ! ARG-1
    100000 Memset 0 64 0 64 ! ARG-1
    left devices 1, streams 1, events 1, allocations 1, hosts 1
ARG-2
    100000 Malloc & 64 8 ! ARG-2
    100000 Malloc & 0 0 ! ARG-2
    100000 MallocHost & 0 ! ARG-2
    100000 CreateEventExWithFlag & 16 ! ARG-2
    100000 HostRegister page 4096 1 & ! ARG-2
    107000 SynchronizeStreamWithTimeout s 0 ! ARG-2
    107000 SynchronizeStreamWithTimeout s -2 ! ARG-2
    107001 SetDevice d2
    107001 SetDevice -1
DEV-1
    0 ResetDevice d0 ! DEV-1
    left streams 1, events 1, allocations 1, hosts 1
    107002 SynchronizeStream s ! CTX-2
DEV-2
    0 SetDevice d0
    0 ResetDevice d0
    0 DestroyStream s
    0 DestroyEvent e
    0 ResetDevice d0
    107002 ResetDevice d0 ! DEV-2
CTX-1
    h = host 64
    0 RecordEvent e s
    elsewhere 107002 GetCurrentContext &
    elsewhere 107002 GetDevice &
    elsewhere 107002 Malloc & 1 0 ! CTX-1
    elsewhere 107002 MallocHost & 1 ! CTX-1
    elsewhere 107002 CreateStream & ! CTX-1
    elsewhere 107002 CreateEventExWithFlag & 3 ! CTX-1
    elsewhere 107002 up m h 64 s ! CTX-1
    elsewhere 107002 RecordEvent e s ! CTX-1
    elsewhere 107002 SynchronizeStream s ! CTX-1
    elsewhere 107002 SynchronizeDevice ! CTX-1
    elsewhere e completes
    elsewhere 0 DestroyEvent e
    elsewhere 0 Free m
    elsewhere 0 FreeHost h
CTX-2
    default = GetCurrentContext
    own = CreateContext d1
    0 GetCurrentContext & -> own
    0 GetDevice & -> d1
    0 DestroyContext own
    107002 Malloc & 1 0 ! CTX-2
    107002 SetCurrentContext own ! CTX-2
    0 SetCurrentContext default
    m = memory 1
CTX-3
    default = GetCurrentContext
    own = CreateContext d0
    107003 up m h 64 s ! CTX-3
    107003 RecordEvent e s ! CTX-3
    107003 StreamWaitEvent s e ! CTX-3
    107003 DestroyStream s ! CTX-3
    0 SynchronizeStream s
    0 up m h 64 0
    0 RecordEvent e 0
    0 SetCurrentContext default
    0 DestroyStream s
CTX-4
    default = GetCurrentContext
    107002 DestroyContext default ! CTX-4
    own = CreateContext d0
    0 DestroyContext own
    107002 DestroyContext own ! CTX-4
CTX-5
    0 SetDevice d1
    s = stream
    107000 RecordEvent e s ! CTX-5
    far = event
    0 RecordEvent far s
    0 SetDevice d0
    s = stream
    0 StreamWaitEvent s far
    own = CreateContext d0
    s = stream
    0 RecordEvent e s
CTX-6
    0 SetDevice d1
    s = stream
    107000 up m h 64 s ! CTX-6
    107000 down h m 64 s ! CTX-6
    far = memory 64
    0 up far h 64 s
STR-1
    0 DestroyStream s
    107017 DestroyStream s ! STR-1
    107017 SynchronizeStream s ! STR-1
    107017 RecordEvent e s ! STR-1
STR-2
    fill h 7
    0 up m h 64 s
    0 DestroyStream s ! STR-2
    m is 7
    s = stream
    0 RecordEvent e s
    0 DestroyStream s
EVT-1
    0 DestroyEvent e
    107017 DestroyEvent e ! EVT-1
    107017 QueryEventStatus e & ! EVT-1
EVT-2
    newer = event
    0 QueryEventStatus newer & -> 1 ! EVT-2
    0 StreamWaitEvent s newer ! EVT-2
EVT-3
    0 RecordEvent e s
    e completes
    0 RecordEvent e s
    0 RecordEvent e s ! EVT-3
EVT-4
    0 RecordEvent e s
    0 DestroyEvent e ! EVT-4
EVT-5
    alone = CreateEventExWithFlag 2
    0 RecordEvent alone s
    207000 StreamWaitEvent s alone ! EVT-5
    alone completes
MEM-1
    h = host 512
    107000 up m h 128 s ! MEM-1
    107000 up m+64 h 64 s ! MEM-1
    107000 down h m 65 s ! MEM-1
    107000 Memset m+128 64 0 64 ! MEM-1
MEM-2
    m = memory 256
    h = host 512
    107000 MemcpyAsync m 64 h 128 1 s ! MEM-2
    107000 Memcpy m 64 h 128 1 ! MEM-2
    107000 Memset m 64 0 128 ! MEM-2
    0 MemcpyAsync m 128 h 128 1 s
MEM-3
    m = memory 4096
    h = host 512
    107000 up m h+256 512 s ! MEM-3
MEM-4
    m = memory 256
    h = host 512
    0 MemcpyAsync m 257 h 64 1 s ! MEM-4
    0 MemcpyAsync m+192 128 h 64 1 s ! MEM-4
    0 MemcpyAsync h+256 512 m 64 2 s ! MEM-4
    0 MemcpyAsync m+192 64 h 64 1 s
MEM-5
    m = memory 256
    107000 Free m+64 ! MEM-5
    0 Free m
    107000 Free m ! MEM-5
MEM-6
    0 down h m 64 s
    0 Free m ! MEM-6
    0 SynchronizeStream s
    h is 0xDD
    m = memory 64
    0 up m h 64 s
    0 SynchronizeStream s
    0 Free m
CPY-1
    100000 MemcpyAsync m 64 h 64 8 s ! CPY-1
    100000 Memcpy m 64 h 64 -1 ! CPY-1
    0 MemcpyAsync m 64 h 64 4 s
CPY-2
    107000 up h m 64 s ! CPY-2
    107000 down m h 64 s ! CPY-2
    107000 MemcpyAsync m 64 h 64 3 s ! CPY-2
    107000 Memcpy m 64 h 64 0 ! CPY-2
CPY-3
    207000 MemcpyAsync h 64 h+128 64 0 s ! CPY-3
    207000 MemcpyAsync h 64 h+128 64 4 s ! CPY-3
    0 Memcpy h 64 h+128 64 0
CPY-4
    0 up m page 64 s ! CPY-4
    0 down page+64 m 64 s ! CPY-4
    0 SynchronizeStream s
    m is 0xDB
    page+64 is 1
    0 Memcpy m 64 page 64 1
    m is 1
CPY-5
    m = memory 256
    h = host 512
    0 up m+64 h+64 64 s
    0 up m h+32 64 s ! CPY-5
    0 up m+1 h 64 s ! CPY-5
    0 down h+8 m+8 64 s ! CPY-5 CPY-5
    0 up m h 33 s
    0 SynchronizeStream s
    0 Memcpy m+1 3 h+65 3 1
CPY-6
    fill h 6
    0 up m h 64 s
    m is 0xA5 ! CPY-6
    0 Memset h 64 7 64 ! CPY-6
    0 Memcpy h+128 64 h 64 0
    0 SynchronizeStream s
    m is 7
CPY-7
    0 HostRegister page 4096 0 &
    107000 up m it 64 s ! CPY-7
    0 up m page 64 s
SEG-1
    m = memory 512
    h = host 512
    0 up m h 512 s
    0 up m h+256 224 s
    0 up m h+256 225 s ! SEG-1
    0 up m h+256 256 s ! SEG-1
    0 down h+448 m 64 s ! SEG-1
    0 HostRegister page 4096 0 &
    0 up m page+4032 64 s
SEG-2
    m = memory 512
    h = host 1024
    0 up m h 64 s
    0 up m h+64 64 s
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
HST-1
    107000 FreeHost h+64 ! HST-1
    0 FreeHost h
    107000 FreeHost page ! HST-1
    107000 FreeHost h ! HST-1
HST-2
    0 up m h 64 s
    0 FreeHost h ! HST-2
    0 SynchronizeStream s
    m is 0xDD
    h = host 256
    0 down h m 64 s
    0 FreeHost h ! HST-2
    0 SynchronizeStream s
HST-3
    other = stream
    0 up m h 64 s
    0 RecordEvent e s
    e completes
    0 SynchronizeStream other
    0 FreeHost h ! HST-3
    h = host 256
    0 up m h 64 s
    0 SynchronizeDevice
    0 FreeHost h
REG-1
    507899 HostRegister page+64 4096 0 & ! REG-1
    507899 HostRegister page 4095 0 & ! REG-1
    0 HostRegister page 8192 0 &
REG-2
    0 HostRegister page 4096 0 &
    507910 HostRegister page 4096 0 & ! REG-2
    507910 HostRegister page 8192 0 & ! REG-2
    0 HostRegister page+4096 4096 0 &
    left devices 1, streams 1, events 1, allocations 1, hosts 1, registrations 2
REG-3
    507911 HostUnregister page ! REG-3
    0 HostRegister page 8192 0 &
    507911 HostUnregister page+4096 ! REG-3
    0 HostUnregister page
    507911 HostUnregister page ! REG-3
REG-4
    107000 HostRegister page 0 0 & ! REG-4
    107000 HostRegister 4096 4096 0 & ! REG-4
REG-5
    0 HostRegister page 4096 0 &
    0 up m page 64 s
    0 HostUnregister page ! REG-5
    0 SynchronizeStream s
    m is 0xDD
    big = host 8192
    0 HostRegister big+4032 4096 0 &
    0 FreeHost big ! REG-5
";
