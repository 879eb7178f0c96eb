//! The rules by the ids of the simulation's page, each with a script that breaks it and does what is allowed.

pub const RULES: &str = "
INIT-1
    bare
    3 DeviceGetCount & ! INIT-1
    0 Init 0
    0 DeviceGetCount & => n
    here n equals d2
    101 DeviceGet & n
CTX-1
    elsewhere 201 MemAlloc & 1 ! CTX-1
    0 EventRecord e s
    0 StreamSynchronize s
    elsewhere 0 StreamIsCapturing s & -> 0
    elsewhere 0 EventQuery e
CTX-2
    0 DevicePrimaryCtxRelease d0
    709 MemAlloc & 1 ! CTX-2
    again = DevicePrimaryCtxRetain d0
    here again differs context
    0 CtxSetCurrent again
    0 MemAlloc & 1
CTX-3
    0 CtxPushCurrent context
    0 CtxPopCurrent & -> context
    0 CtxPopCurrent & -> context
    201 CtxPopCurrent & ! CTX-3
CTX-4
    0 DevicePrimaryCtxRelease d0
    201 DevicePrimaryCtxRelease d0 ! CTX-4
CTX-5
    two devices
    far = DevicePrimaryCtxRetain d1; 0 CtxSetCurrent far
    other = stream
    400 EventRecord e other ! CTX-5
    1 up m page 64 other ! CTX-5 ? 0 addresses are one space for all devices (580.159.04)
    400 StreamSynchronize s ! CTX-5 ? 0 a stream carries its context, so another one may be current (580.159.04)
    0 EventQuery e ! EVT-2
    finish other
CTX-6
    two devices
    201 CtxDestroy context ! CTX-6
    own = CtxCreate 0 d1
    0 CtxGetCurrent & -> own
    other = stream
    0 StreamGetCtx other & -> own
    0 CtxDestroy own
    0 CtxGetCurrent & -> context
    201 CtxDestroy own ! CTX-6 ? - it is gone
STR-1
    0 StreamDestroy s
    400 StreamDestroy s ! STR-1 ? - it is gone
STR-2
    0 up m page 64 s
    0 StreamDestroy s ! STR-2
STR-3
    0 StreamGetId 2 & => mine
    beside 0 up m page 64 2; 0 EventRecord e 2; 0 StreamGetId 2 & => theirs; 0 StreamGetId 2 & -> theirs
    mine differs theirs
    0 StreamGetId 2 & -> mine
    e completes
    0 StreamBeginCapture 2 2
    beside 0 StreamIsCapturing 2 & -> 0
    0 StreamIsCapturing 2 & -> 1
    0 StreamEndCapture 2 &
EVT-1
    0 EventDestroy e
    400 EventQuery e ! EVT-1 ? - it is gone
EVT-2
    0 EventQuery e ! EVT-2
EVT-3
    0 EventRecord e s
    e completes
    0 EventRecord e s
    0 EventRecord e s ! EVT-3
EVT-4
    0 EventRecord e s
    0 EventDestroy e ! EVT-4
MEM-1
    0 register page+4096 8192
    0 register page 4096
    712 register page+8192 8192 ! MEM-1
MEM-2
    0 register page 8192
    1 MemHostUnregister page+4096 ! MEM-2
    0 MemHostUnregister page
MEM-3
    1 register 0 4096 ! MEM-3
MEM-4
    0 register page 4096
    0 up m page 4096 s
    0 MemHostUnregister page ! MEM-4
    finish s
MEM-5
    m = memory 8192
    0 register page 4096
    1 up m page 8192 s ! MEM-5
    0 up m page+4096 4096 s
    finish s
MEM-6
    1 up m+1 page 4096 s ! MEM-6
    1 down page m+1 4096 s ! MEM-6
    1 up 0 page 4096 s ! MEM-6
    1 MemcpyDtoDAsync m m+8 4096 s ! MEM-6
    finish s
MEM-7
    1 MemFree m+8 ! MEM-7
MEM-8
    0 up m page 4096 s
    0 MemFree m ! MEM-8
    finish s
CAP-1
    other = stream
    0 EventRecord e other
    0 StreamBeginCapture s 0
    beside 900 EventQuery e ! CAP-1
    901 StreamEndCapture s &
    0 StreamBeginCapture s 0
    0 ThreadExchangeStreamCaptureMode relaxed
    e completes
    0 ThreadExchangeStreamCaptureMode relaxed
    here relaxed holds 2
    0 StreamEndCapture s &
    0 register page 4096
    0 StreamBeginCapture s 0; 900 MemAlloc & 4096; 901 StreamEndCapture s & ! CAP-1
    0 StreamBeginCapture s 0; 900 MemHostUnregister page; 901 StreamEndCapture s & ! CAP-1
    0 StreamBeginCapture s 0; 900 StreamSynchronize other; 901 StreamEndCapture s & ! CAP-1
    third = stream
    0 StreamBeginCapture s 0
    each 0 CtxPushCurrent context; 0 CtxGetCurrent & -> context; 0 CtxPopCurrent &
    each x = event; 0 EventDestroy x; x = stream; 0 StreamDestroy x
    each 0 up m page 4096 other; 0 down page m 4096 other
    each x = event; 0 EventRecord x other; 0 StreamWaitEvent third x 0
    0 StreamEndCapture s &
    finish third
CAP-2
    0 StreamBeginCapture s 2; 900 StreamSynchronize s; 901 StreamEndCapture s & ! CAP-2
    0 StreamBeginCapture s 2; 900 StreamGetId s &; 901 StreamEndCapture s & ! CAP-2
CAP-3
    0 StreamBeginCapture s 2
    0 EventRecord e s
    907 EventQuery e ! CAP-3
    other = stream
    here 907 StreamWaitEvent other e 0 ! CAP-3
CAP-4
    0 StreamBeginCapture s 1
    beside 908 StreamEndCapture s & ! CAP-4
CAP-5
    blocking = StreamCreate 0
    other = stream
    0 StreamBeginCapture other 2
    0 up m page 64 0
    0 StreamBeginCapture blocking 2
    906 up m page 64 1 ! CAP-5
    906 StreamBeginCapture 0 2 ! CAP-5
CAP-6
    other = stream
    0 EventRecord e other
    0 StreamBeginCapture s 2
    905 StreamWaitEvent s e 0 ! CAP-6
ARG-1
    1 MemAlloc 0 64 ! ARG-1
GRA-1 ? - a call from the driver's own callback: undefined there, and it may never come back
    object = UserObjectCreate 0 asks 1 1
    0 UserObjectRelease object 1; answered 800 ! GRA-1
GRA-2
    1 UserObjectCreate & 0 0 1 1 ! GRA-2
GRA-3
    0 StreamBeginCapture s 2; 0 StreamEndCapture s & => graph
    object = UserObjectCreate 0 idle 1 1
    run = GraphInstantiateWithFlags graph 0
    0 GraphDestroy graph
    1 GraphDestroy graph ! GRA-3 ? - it is gone
    0 GraphExecDestroy run
    1 GraphExecDestroy run ! GRA-3 ? - it is gone
    0 UserObjectRelease object 1
    1 UserObjectRelease object 1 ! GRA-3 ? - it is gone
GRA-4
    object = UserObjectCreate 0 idle 2 1
    1 UserObjectRelease object 3 ! GRA-4 ? 0 the driver does not count (580.159.04)
    0 UserObjectRelease object 2
    0 StreamBeginCapture s 2
    0 StreamGetCaptureInfo_v3 s _ 0 & 0 0 0 => graph
    1 GraphDestroy graph ! GRA-4 ? - a graph that is still being captured belongs to the capture: undefined there
HST-1
    locked = MemHostAlloc 4096 0; managed = MemAllocManaged 4096 1
    1 MemFreeHost locked+64 ! HST-1
    0 MemFreeHost locked
    0 MemFree managed
    0 MemHostAlloc & 0 0 -> 0
    1 MemAllocManaged & 0 1
HST-2
    locked = MemHostAlloc 4096 1
    0 up m locked 4096 s
    0 MemFreeHost locked ! HST-2
    managed = MemAllocManaged 4096 1
    0 up m managed 4096 s
    0 MemFree managed ! HST-2
    0 down page m 4096 s; 0 StreamSynchronize s
    here page is 165
HST-3
    locked = MemHostAlloc 4096 7; managed = MemAllocManaged 4096 1
    1 register locked 4096 ! HST-3
    1 register managed+100 10 ! HST-3
HST-4
    locked = MemHostAlloc 4096 0; managed = MemAllocManaged 4096 1
    0 register page+100 100
    0 MemHostGetDevicePointer & page+100 0 -> page+100
    0 MemHostGetDevicePointer & locked 0 -> locked
    1 MemHostGetDevicePointer & page+200 0 ! HST-4
    1 MemHostGetDevicePointer & managed 0 ! HST-4
    here sim attribute 19 0
    here 1 MemHostGetDevicePointer & locked 0
HST-5
    1 MemHostRegister readonly 4096 1 ! HST-5
    0 MemHostRegister readonly 4096 9
    0 MemHostUnregister readonly
    here sim by-hand 1
    1 MemHostRegister 4096 4096 0 ! HST-5
HST-6
    0 MemHostRegister page 4096 9
    0 up m page 4096 s
    1 down page m 4096 s ! HST-6
    finish s
HST-7
    1 MemHostRegister page 64 64 ! HST-7
    here 1 MemHostGetDevicePointer & page 1 ! HST-7
HST-8
    0 DeviceGetAttribute & 113 d0
    here sim attribute 113 0
    here 801 MemHostRegister page 64 9 ! HST-8
HST-9
    here sim attribute 89 0
    here 0 MemAllocManaged & 4096 1 ! HST-9
PTR-1
    0 PointerGetAttributes 1 kind places m; _ holds 2
    heap = malloc 64
    0 PointerGetAttributes 1 kind places heap; _ holds 0
    1 up heap page 64 s ! PTR-1
PTR-2
    1 PointerGetAttributes 1 names places 64 ! PTR-2
HEAP-1
    0 CtxGetLimit & 2 -> 8388608
    0 CtxSetLimit 2 67108864
    0 CtxGetLimit & 2 -> 67108864
    heap = malloc 64
    1 CtxSetLimit 2 16777216 ! HEAP-1
    0 CtxGetLimit & 2 -> 67108864
    two devices
    far = DevicePrimaryCtxRetain d1; 0 CtxSetCurrent far
    0 CtxSetLimit 2 16777216
POOL-1
    other = stream
    p = MemAllocAsync 64 s
    0 EventRecord e s
    0 StreamWaitEvent other e 0
    0 up p page 64 other
    0 StreamSynchronize other
    p = MemAllocAsync 64 s
    0 up p page 64 other
    0 StreamSynchronize other ! POOL-1
    0 MemFreeAsync p s
    1 up p page 64 s ! MEM-6
    1 MemFreeAsync p s ! MEM-7
    0 MemFreeAsync m s
    0 StreamSynchronize s
POOL-4
    other = stream
    p = MemAllocAsync 64 s
    0 StreamSynchronize s
    0 up p page 64 other
    0 MemFreeAsync p s
    0 StreamSynchronize s ! POOL-4
BAT-1
    0 register page 16384
    fill page 5
    1 batch 0:1 0 m page 1024 4 ! BAT-1
    0 batch 0:1 s m page 1024 4
    0 down page+4096 m 4096 s; 0 StreamSynchronize s
    page+4096 is 5x4096
BAT-2
    0 register page 16384
    1 batch 0:1 s m page 1024 2 m+2048 page+2048 0 1 m+3072 page+3072 1024 1 ! BAT-2
    finish s
    here 0 StreamSynchronize s
BAT-3
    0 register page 16384
    0 StreamBeginCapture s 2
    900 batch 0:1 s m page 1024 4 ! BAT-3
    0 StreamEndCapture s & => graph; 0 GraphDestroy graph
BAT-4
    0 register page 16384
    0 batch 0:1 s m page 1024 2 m+100 page+2048 1024 1 ! BAT-4 ? - copies in each other's way: undefined there
    0 StreamSynchronize s
BAT-5
    0 register page 16384
    0 batch 0:1,3:1 s m page 1024 4
    1 batch 1:1 s m page 1024 4 ! BAT-5
    0 StreamSynchronize s
BAT-6 ? - drivers lose the device now and then
    0 register page 16384
    race 0 batch 0:1 s m page 1024 4 ! BAT-6
    0 StreamSynchronize s
BAT-7
    0 register page 16384
    here sim attribute 91 0
    0 MemHostGetDevicePointer & page 0 => there
    here there differs page
    0 batch 0:1 s m there 64 2
    0 down page m 64 s; 0 StreamSynchronize s
    here 0 batch 0:1 s m page 64 2 ! BAT-7
    here 700 StreamSynchronize s
KER-1
    218 ModuleLoadData & nokernels ! KER-1
KER-2
    f = kernel collect
    0 FuncLoad f
    0 ModuleUnload module
    400 ModuleUnload module ! KER-2 ? - it is gone
KER-3
    module = ModuleLoadData kernels
    500 ModuleGetFunction & module nofunction ! KER-3
    0 ModuleUnload module
KER-4
    f = kernel spread
    1 launch f 0 s 0 0 0 ! KER-4
    fill page 7; 0 up m page 512 s
    fill page 1; 0 up m page 110 s
    rows = rows m+257,3,100 m+400,3,5
    table = memory 32; 0 up table rows 32 s
    0 launch f 16 s m table 2
    0 StreamSynchronize s
    0 down page m 512 s; 0 StreamSynchronize s
    page is 1x110 7x147 1x100 7x43 1x5 7x107
    0 ModuleUnload module
KER-5
    f = kernel spread
    rows = rows 64,0,16
    table = memory 16; 0 up table rows 16 s
    0 launch f 16 s m table 1
    700 StreamSynchronize s ! KER-5
    700 StreamSynchronize s
KER-6 ? - threads that write the same bytes without order: undefined there
    f = kernel spread
    rows = rows m+128,0,16 m+143,16,16 m+128,0,16 m+15,64,1
    table = memory 64; 0 up table rows 64 s
    0 launch f 16 s m table 2
    0 launch f 16 s m table+32 2
    0 StreamSynchronize s ! KER-6 KER-6
    0 ModuleUnload module
KER-7
    f = kernel spread
    0 StreamBeginCapture s 2
    0 launch f 16 s 0 0 0 ! KER-7
    0 StreamEndCapture s & => graph; 0 GraphDestroy graph
    0 ModuleUnload module
KER-8 ? - a module is unloaded while its kernel may run: undefined there
    f = kernel spread
    rows = rows m+128,0,16
    table = memory 16; 0 up table rows 16 s
    0 StreamSynchronize s
    0 launch f 16 s m table 1
    0 ModuleUnload module ! KER-8
";

/// What calls do that no code shows: the same on the simulation, where nothing runs before a call asks for
/// it, and on a driver, whose streams a kernel keeps busy meanwhile.
pub const EFFECTS: &str = "
a copy from registered memory reads it when it runs
    0 register page 16384
    fill page 1; stall s; 0 up m page 4096 s; fill page 2
    0 down page+4096 m 4096 s; release; 0 StreamSynchronize s
    page+4096 is 2x4096
a copy from plain memory has read it when the call returns
    0 register page+8192 4096
    fill page 1; stall s; 0 up m page 4096 s; fill page 2
    0 down page+8192 m 4096 s; release; 0 StreamSynchronize s
    page+8192 is 1x4096
an event is complete behind what it covers and stays so
    filled 3
    stall s; 0 EventRecord e s
    600 EventQuery e
    release; e completes
    stall s; 0 down page m 4096 s; release
    0 EventQuery e
    0 StreamSynchronize s
    page is 3x4096
a stream waits for an event of another
    other = stream; late = event
    filled 3
    stall s; 0 EventRecord e s; 0 StreamWaitEvent other e 0; 0 down page m 4096 other; 0 EventRecord late other
    600 EventQuery late
    page is 0x4096
    release; late completes
    page is 3x4096
    0 EventQuery e
    0 StreamSynchronize s
an event recorded again covers the new place only
    other = stream
    filled 3
    stall s; 0 down page m 4096 s; 0 EventRecord e s; 0 EventRecord e other ! EVT-3
    release; e completes
    page is 0x4096
    0 StreamSynchronize s
    page is 3x4096
what a destroyed event covered still runs
    filled 3
    stall s; 0 down page m 4096 s; 0 EventRecord e s; 0 EventDestroy e ! EVT-4
    release; 0 StreamSynchronize s
    page is 3x4096
the copies of a destroyed stream still run
    filled 3
    stall s; 0 down page m 4096 s; 0 StreamDestroy s ! STR-2
    release; page becomes 3x4096
freeing comes back after the copies of the memory
    filled 3
    stall s; 0 down page m 4096 s; 0 MemFree m; page is 3x4096 ! MEM-8
    release; 0 StreamSynchronize s
unregistering comes back after the copies of the memory
    filled 3
    stall s; 0 down page m 4096 s; 0 MemHostUnregister page; page is 3x4096 ! MEM-4
    release; 0 StreamSynchronize s
";

/// How the simulation behaves where no rule is broken and no driver is compared.
pub const BEHAVIOUR: &str = "
the copies of a batch run backwards and what comes before a refused one is queued
    m = memory 8192
    0 register page 16384
    fill page 1
    fill page+4096 2
    1 batch 0:1 s m page 4096 1 m page+4096 4096 1 m+1073741824 page 16 1 -> 2 ! MEM-6 BAT-4
    0 down page+8192 m 4096 s
    0 StreamSynchronize s
    page+8192 is 1x4096
";
