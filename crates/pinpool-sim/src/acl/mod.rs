//! A simulated `libascendcl`.
//!
//! It has the entry points that pinpool calls and those that a server beside it calls. No NPU was at hand: what it
//! knows is from public headers and documentation, of CANN 8.0 to 9.2.
//!
//! # How it works
//!
//! Device memory is ordinary memory under made-up addresses that no CPU can read, filled with 0xA5 when it is
//! allocated, as is host memory. Contexts, streams and events are numbers that are never used twice, unless a test
//! wants the handle of a destroyed stream to be given to the next one.
//!
//! The vendor's library does not protect memory that is freed while it is used, and neither does this one: a queued
//! copy from memory that was freed or unregistered carries 0xDD, one to such memory is discarded, and one from memory
//! that is not page-locked brings the device 0xDB. Nothing of that is an error, which is why each is a violation.
//!
//! [`Library`] names older ones than today's, which lack some calls.
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
//! | EVT-1 | names an event that does not exist, or no more | 107017 |
//! | EVT-2 | asks about an event that was never recorded, or waits for it | complete; no wait |
//! | EVT-3 | records an event again that is not complete | covers the new place only |
//! | EVT-4 | destroys an event that is recorded and not complete (pinpool forbids it) | it is destroyed |
//! | EVT-5 | has a stream wait for an event that was made without `ACL_EVENT_SYNC` | 207000 |
//! | MEM-1 | names device memory that is not allocated, or leaves its allocation | 107000 |
//! | MEM-2 | copies or sets more than it says there is room for | 107000 |
//! | MEM-3 | names memory that is page-locked in part | 107000? |
//! | MEM-4 | says that there is more room than there is | what it is called for |
//! | MEM-5 | frees what is not the start of an allocation | 107000? |
//! | MEM-6 | frees device memory that a queued copy uses | it is freed |
//! | CPY-1 | copies in a way that there is not | 100000 |
//! | CPY-2 | copies in a way that does not fit where the memory is | 107000 |
//! | CPY-3 | copies asynchronously from host to host, on a host | 207000 |
//! | CPY-4 | hands memory that is not page-locked to an asynchronous copy | 0, and the bytes are wrong |
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
//! | REG-3 | unregisters what is not registered, or not from its start | 507911 |
//! | REG-4 | registers nothing, or memory that is not mapped or cannot be written to | 107000? |
//! | REG-5 | unregisters memory that a queued copy uses, or frees what is registered | it is done |
//! | ARG-1 | passes null where something is read or written | 100000 |
//! | ARG-2 | passes flags, sizes, policies or timeouts that do not exist | 100000, and 107000 for timeouts |
//!
//! No violations, but errors: no device at all (207004?), one that does not exist (107001), no more streams (207008)
//! or memory (207001), a single block of host memory above the extent's limit (207001), registering where driver or
//! product cannot (207000), a library that is initialised already (100002), a time that ran out (507046). A bare thread
//! that asks for its context or device gets 107002: there is no other way to ask. Nor can a thread be given no context:
//! null is refused.
//!
//! From CANN 8.5 on, and with a driver that can tell, CPY-4 is no loss: the copy is done when the call returns. A
//! program that also runs on older versions cannot rely on that.
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
//! # What there is
//!
//! Two devices with 256 MiB each, on a host, unless commands (`control.rs`) say otherwise.

mod calls;
mod codes;
mod control;
mod copies;
mod devices;
mod events;
mod host;
mod streams;
mod world;

use std::ffi::c_void;

use crate::common::symbols;
pub use world::Npus;
pub(crate) use world::{last_report, world};

symbols! {
    calls:
        aclInit aclFinalize aclrtGetSocName aclGetRecentErrMsg;
    copies:
        aclrtMemcpy aclrtMemcpyAsync aclrtMemset;
    devices:
        aclrtGetDeviceCount aclrtGetRunMode aclrtSetDevice aclrtResetDevice aclrtGetDevice
        aclrtSynchronizeDevice aclrtCreateContext aclrtDestroyContext aclrtSetCurrentContext
        aclrtGetCurrentContext aclrtMalloc aclrtFree;
    events:
        aclrtCreateEventExWithFlag aclrtDestroyEvent aclrtRecordEvent aclrtQueryEventStatus aclrtStreamWaitEvent;
    host:
        aclrtMallocHost aclrtFreeHost aclrtHostRegister aclrtHostUnregister aclrtPointerGetAttributes;
    streams:
        aclrtCreateStream aclrtDestroyStream aclrtSynchronizeStream aclrtSynchronizeStreamWithTimeout;
}

/// Which calls a library has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Library {
    Today,
    /// As of the beginning of 2024 (CANN 8.0): no memory can be registered, or asked about.
    Of2024,
}

/// Calls that came later.
const SINCE_2024: [&str; 3] = ["aclrtHostRegister", "aclrtHostUnregister", "aclrtPointerGetAttributes"];

impl Library {
    /// The library of that name: `Of2024`.
    ///
    /// # Panics
    /// There is no such library.
    pub fn named(name: &str) -> Self {
        [Self::Today, Self::Of2024]
            .into_iter()
            .find(|of| format!("{of:?}") == name)
            .expect("a library's name")
    }

    /// The calls that it lacks.
    pub fn lacks(self) -> &'static [&'static str] {
        if self == Self::Today { &[] } else { &SINCE_2024 }
    }

    /// The entry point with this name, if the library has it.
    pub fn symbol(self, name: &str) -> Option<*const c_void> {
        symbol(name).filter(|_| !self.lacks().contains(&name))
    }
}

impl Npus {
    /// Two NPUs of that library, in a world that this thread has entered.
    pub fn new(library: Library) -> Self {
        let made = Self::add();
        made.command(&format!("setup library {library:?}"));
        made
    }
}
