//! A stand-in for `libcuda.so.1`, for tests on machines without a GPU.
//!
//! It has the driver's entry points that pinpool calls, is loaded by the very code that loads the driver, and keeps the
//! driver's rules as strictly as they can be read. Where the driver would let something pass that our own contract
//! forbids, it does what the driver does and writes the violation down.
//!
//! # How it works
//!
//! There are no threads and no GPU. A stream is a queue; what is submitted is queued and nothing more. Things run when
//! somebody finds out about them, and only as far as that needs: a query of an event first says "not ready" a few times,
//! then runs what the event covers; synchronising runs all of it. So every copy is as late as the rules allow, and who
//! reads or reuses memory early gets the wrong bytes each time, not now and then. (What this cannot show is a copy that
//! runs *while* the CPU works: for that there are the real driver and the host device's threads.)
//!
//! Device memory is ordinary memory under made-up addresses, filled with 0xA5 when it is allocated. Contexts, streams and
//! events are numbers that are never used twice. All of it is behind one lock.
//!
//! # Rules
//!
//! Each violation is written down as one line that starts with the rule's id; `tests/standin.rs` breaks each on purpose.
//!
//! | id | who breaks it | what the call does |
//! | --- | --- | --- |
//! | INIT-1 | calls before `cuInit` | 3 |
//! | CTX-1 | makes a call that needs a context where none is current | 201 |
//! | CTX-2 | uses a context that does not exist any more | 709 |
//! | CTX-3 | pops where nothing was pushed | 201 |
//! | CTX-4 | releases a primary context more often than it was retained | 201 |
//! | CTX-5 | uses one context's stream or event with another's, or with another one current | 400 |
//! | STR-1 | names a stream that does not exist, or no more | 400 |
//! | STR-2 | destroys a stream that has copies queued (allowed by the driver, not by our contract) | it still runs |
//! | EVT-1 | names an event that does not exist, or no more | 400 |
//! | EVT-2 | asks about an event that was never recorded | 0: complete |
//! | EVT-3 | records an event again that is not complete | covers the new place only |
//! | EVT-4 | destroys an event that is recorded and not complete | it is gone |
//! | MEM-1 | registers memory that overlaps what is registered | 712 |
//! | MEM-2 | unregisters what is not registered, or not from its start | 713 |
//! | MEM-3 | registers nothing, or past the end of the address space | 1 |
//! | MEM-4 | unregisters memory that a queued copy uses | it is done |
//! | MEM-5 | hands memory to an asynchronous copy that is registered in part | 1 |
//! | MEM-6 | names device memory that is not allocated, or leaves its allocation | 1 |
//! | MEM-7 | frees what is not the start of an allocation | 1 |
//! | MEM-8 | frees memory that a queued copy uses (the driver waits for that) | the copies run first |
//! | HST-1 | frees host memory that `cuMemHostAlloc` did not give, or not from its start, or twice | 1 |
//! | HST-2 | frees host memory that a queued copy uses (the driver waits for that) | the copies run first |
//! | HST-3 | registers memory of the driver's own | 1 |
//! | HST-4 | asks for the device's address of memory that is neither registered nor `cuMemHostAlloc`'s | 1 |
//! | HST-5 | registers memory that is not mapped, or cannot be written to and is not said to be only read | 1 |
//! | HST-6 | has a copy write to memory that was registered as only read | 1 |
//! | HST-7 | passes flags that do not exist | 1 |
//! | HST-8 | registers as only read where the device cannot | 801 |
//! | HST-9 | allocates managed memory on a device that does not share it with a working host (allowed by the driver, not by our contract) | there it is |
//! | CAP-1 | makes an unsafe call while a capture forbids it | 900, and the capture is spoiled |
//! | CAP-2 | synchronises or waits on a capturing stream from outside | 900, and the capture is spoiled |
//! | CAP-3 | asks about an event that was recorded in a capture | 907 |
//! | CAP-4 | ends a capture on another thread than it was begun on, where that matters | 908 |
//! | ARG-1 | passes null where something is written | 1 |
//!
//! Memory that is not registered at all may be copied from and to (the driver stages it): that is counted as a *note*,
//! PAGEABLE. After a sticky error every call that touches the context gives its code, and what was queued never runs.
//!
//! # Control
//!
//! `standin_*` in `control.rs`; and at load, from the environment: `PINPOOL_STANDIN_DEVICES` (2), `PINPOOL_STANDIN_MEMORY`
//! (bytes of each device, 256 MiB), `PINPOOL_STANDIN_VERSION` (12080), `PINPOOL_STANDIN_FAIL` (`name:nth:code`, as
//! `standin_fail` takes it).

mod calls;
mod control;
mod host;
mod world;
