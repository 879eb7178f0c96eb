//! A stand-in for `libascendcl.so`, for tests on machines without an NPU.
//!
//! It has the entry points that pinpool calls and those that a server beside it calls, is loaded by the very code that
//! loads the vendor's library, and keeps that library's rules as strictly as they can be read. No NPU was at hand: what
//! it knows is from public headers and documentation, of CANN 5.0 to 9.2. Where the library would let something pass
//! that its documentation or pinpool's own contract forbids, it does what the library does and writes the violation
//! down.
//!
//! # How it works
//!
//! There are no threads and no NPU. A stream is a queue; what is submitted is queued and nothing more. Queued work runs
//! when a call finds out about it, and only as far as that needs: a query of an event first says "not ready" a few
//! times, then runs what the event covers; synchronising runs all of it. So every copy is as late as the rules allow,
//! and a program that reads or reuses memory early gets the wrong bytes each time, not now and then. (What this cannot
//! show is a copy that runs *while* the CPU works: for that there are the host device's threads.)
//!
//! Device memory is ordinary memory under made-up addresses that no CPU can read, filled with 0xA5 when it is
//! allocated, as is host memory. Contexts, streams and events are numbers that are never used twice, unless a test
//! wants the handle of a destroyed stream to be given to the next one. All of it is behind one lock.
//!
//! The vendor's library does not protect memory that is freed while it is used, and neither does this one: a queued
//! copy from memory that was freed or unregistered carries 0xDD, one to such memory is discarded, and one from memory
//! that is not page-locked brings the device 0xDB. Nothing of that is an error, which is why each is a violation.
//!
//! With the feature `acl2022` the library has what there was at the end of 2022 (CANN 6.0), with `acl5` what there was
//! at its beginning (CANN 5.0): no flags for events and streams, and no event status but `aclrtQueryEvent`.
//!
//! # Rules
//!
//! Each violation is written down as one line that starts with the rule's id; `tests/acl/standin` breaks each on
//! purpose. A code with a question mark is a guess: the documentation says that the call fails, or nothing.
//!
//! | id | the program | what the call does |
//! | --- | --- | --- |
//! | INIT-1 | calls before `aclInit` (the runtime does not check) | what it is called for |
//! | INIT-2 | calls `aclFinalize`, which ends the library for all users (pinpool's contract forbids it) | it is ended |
//! | INIT-3 | calls when the library was ended | 100001? |
//! | INIT-4 | ends what is not initialised, or no more | 100037 |
//! | DEV-1 | resets a device that has contexts, streams or events | they are destroyed |
//! | DEV-2 | resets a device more often than it was set | 107002? |
//! | CTX-1 | makes a call that needs a context where none is current | 107002 |
//! | CTX-2 | uses a context that does not exist any more, or makes it current | 107002 |
//! | CTX-3 | uses one context's stream while another one is current, where that matters | 107003 |
//! | CTX-4 | destroys a context that is not there, or a default one | 107002 |
//! | CTX-5 | records an event on another device's stream | 107000? |
//! | CTX-6 | names one device's memory in a copy on another's stream | 107000? |
//! | STR-1 | names a stream that does not exist, or no more | 107017 |
//! | STR-2 | destroys a stream that has work queued (the runtime waits; synchronising first is asked for) | it still runs |
//! | STR-3 | makes a stream that the host cannot use: whose tasks wait for a model, or which is the device's own | there it is |
//! | EVT-1 | names an event that does not exist, or no more | 107017 |
//! | EVT-2 | asks about an event that was never recorded, or waits for it | complete for `ExWithFlag`, else not; waiting ends |
//! | EVT-3 | records an event again that is not complete | covers the new place only |
//! | EVT-4 | destroys an event that is recorded and not complete (pinpool forbids it) | it is destroyed |
//! | EVT-5 | has a stream wait for, or resets, an event that was made without `ACL_EVENT_SYNC` | 207000, and for resetting 207000? |
//! | EVT-6 | resets an event of `aclrtCreateEvent` or of `aclrtCreateEventExWithFlag` | never complete?; 207000 |
//! | EVT-7 | asks for the old statuses of an event of `aclrtCreateEventExWithFlag` | 207000 |
//! | EVT-8 | records an event of `aclrtCreateEvent` when the device has none left (the runtime blocks) | 207007? |
//! | MEM-1 | names device memory that is not allocated, or leaves its allocation | 107000 |
//! | MEM-2 | copies or sets more than it says there is room for | 107000 |
//! | MEM-3 | names memory that is page-locked in part | 107000? |
//! | MEM-4 | says that there is more room than there is | what it is called for |
//! | MEM-5 | frees what is not the start of an allocation | 107000? |
//! | MEM-6 | frees device memory that a queued copy uses | it is freed |
//! | CPY-1 | copies in a way that there is not | 100000 |
//! | CPY-2 | copies in a way that does not fit where the memory is | 107000 |
//! | CPY-3 | copies asynchronously from host to host, on a host | 207000 |
//! | CPY-4 | hands memory that is not page-locked to an asynchronous copy or fill | 0, and the bytes are wrong |
//! | CPY-5 | copies asynchronously from or to what is on no multiple of 64 | 0 |
//! | CPY-6 | copies or sets at once what something queued writes, or reads where it is written | 0, in no order |
//! | CPY-7 | copies from or to the device's address of registered memory | 107000? |
//! | SEG-1 | copies a part of a block that ends nearer to the block's end than `ALIGN_UP(len, 32) + 32` | 0 |
//! | SEG-2 | the same, to what a queued copy uses (only if told that each copy is of a whole segment) | 0 |
//! | HST-1 | frees host memory that was not allocated here, or not from its start, or twice | 107000? |
//! | HST-2 | frees host memory that a queued copy uses | it is freed |
//! | HST-3 | frees host memory that a stream used, which only an event was asked about since (freeing was seen to fail) | 0 |
//! | REG-1 | registers memory that does not begin or end with a page of 4 KiB | 507899 |
//! | REG-2 | registers memory that overlaps what is registered | 507910 |
//! | REG-3 | unregisters what is not registered, or not from its start; asks for the device's address of such | 507911 |
//! | REG-4 | registers nothing, or memory that is not mapped or cannot be written to | 107000? |
//! | REG-5 | unregisters memory that a queued copy uses, or frees what is registered | it is done |
//! | REG-6 | pins memory that is page-locked already | 107000? |
//! | ARG-1 | passes null where something is read or written | 100000, and 107000 in a configuration |
//! | ARG-2 | passes flags, sizes, policies or timeouts that do not exist | 100000, and 107000 for timeouts and attributes |
//!
//! No violations, but errors: no device at all (207004?), one that does not exist (107001), no more streams (207008),
//! events (207007) or memory (207001), a single block of host memory above the extent's limit (207001), `VA_FLAG` or
//! registering where driver or product have neither (207000), a library that is initialised already (100002), a time
//! that ran out (507046 for a stream, 507047 for an event). A bare thread that asks for its context
//! or device gets 107002: there is no other way to ask. Nor can a thread be given no context: null is refused.
//!
//! From CANN 8.5 on, and with a driver that can tell, CPY-4 is no loss: the copy is done when the call returns. A
//! program that also runs on older versions cannot rely on that.
//!
//! *Notes* are counted: REPEATED-INIT; QUERIED-ELSEWHERE, for `aclrtQueryEvent` on another thread than the one that
//! recorded (it is documented for the same one only, and CANN 5.0 has no other call to ask with).
//!
//! When the program runs on the device (RC mode), host memory is the device's: it counts as such, starts on a multiple
//! of 16 that is none of 64, cannot be registered, and is copied from and to in any way.
//!
//! After an error that ends a device, every call that touches it gives its code until the device is reset, and what was
//! queued never runs.
//!
//! # Not there
//!
//! Captures and models, values written and waited for, batched copies, host functions and callbacks, events between
//! processes, memory of the virtual address calls.
//!
//! # The end of the process
//!
//! The library takes itself down in an exit handler, which is registered when it is loaded, and again when it is
//! initialised. A call that comes later is refused with 100001 and written down as END-1, and calls that are under way at
//! that moment as END-2: the vendor's library may crash then. The report of a process that ends so is written to the file
//! that `PINPOOL_STANDIN_REPORT` names, and then the handler takes some time, in which late calls can come.
//!
//! # Control
//!
//! `standin_*` in `control.rs`, here and two folders up; and at load, from the environment: `PINPOOL_STANDIN_DEVICES`
//! (2), `PINPOOL_STANDIN_MEMORY` (bytes of each device, 256 MiB), `PINPOOL_STANDIN_RC` (0: the program runs on a host),
//! `PINPOOL_STANDIN_EVENTS` (65536 for each device) and `PINPOOL_STANDIN_STREAMS` (1984), `PINPOOL_STANDIN_SOC` (the
//! chip's name), `PINPOOL_STANDIN_EXTENT` (the most bytes of one block of host memory, 200 GiB) and
//! `PINPOOL_STANDIN_HOST` (of all), `PINPOOL_STANDIN_REGISTER` (1) and `PINPOOL_STANDIN_VA` (0: drivers before 25.5),
//! `PINPOOL_STANDIN_SEGMENTS` (0; 1: every copy is of a whole segment), `PINPOOL_STANDIN_FAIL` (`name:nth:code`, as
//! `standin_fail` takes it), `PINPOOL_STANDIN_REPORT` (a file that the report is written to when the process exits).

// Older libraries have fewer calls.
#![cfg_attr(feature = "acl2022", allow(dead_code))]

mod calls;
mod codes;
mod control;
mod copies;
mod devices;
mod events;
mod host;
#[path = "../../control.rs"]
mod shared;
mod streams;
mod world;
