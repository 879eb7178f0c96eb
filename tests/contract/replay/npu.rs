//! A simulated Ascend device, with the library of today, on the device itself, and with that of 2024.
//!
//! The simulation copies only when a caller waits, so every copy is as late as it may be; and what a library does that
//! copies from memory which was given away early, the simulation does. No such device was at hand: on a real one these
//! scenarios are not run.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use pinpool::{Device, DeviceSlice, Stream, acl};

use super::plain::{Cells, Engine, Remote, Words};
use super::worker::{Machine, On, Setup, Site};
use super::{BYTES, WORDS};
use crate::support::doubles::ascendcl::{DEVICE_TO_HOST, HOST_TO_DEVICE, made, says};
use crate::support::doubles::npu::{OF_2024, ON_DEVICE, TODAY};
use crate::support::doubles::{StandIn, npu_name};

/// Checkouts per scenario, through pinpool and through the plain pool.
const FULL: u64 = 40_000;
const USUAL: u64 = 14_000;
const PLAIN: u64 = 10_000;
/// The plain pool's buffers lie as far apart as the library wants parts of a block to.
const STRIDE: usize = 2 * BYTES;
const BUFFERS: usize = 128;

/// Runs a scenario in each of the ways.
pub fn on_npu(scenario: fn(&dyn Site)) {
    for way in [TODAY, ON_DEVICE, OF_2024] {
        println!("{}", way.name);
        let site = Npu::new(way.machine());
        scenario(&site);
        assert_eq!(site.server.stand_in.report().violations, Vec::<String>::new());
    }
}

/// The library beside pinpool, never unloaded.
struct Server {
    stand_in: StandIn,
    /// The device's default context, which pinpool works in too.
    context: usize,
    /// For the plain pool: a block of the library's.
    block: usize,
    taken: AtomicUsize,
}

impl Server {
    fn enter(&self) {
        says!(self, 0, "aclrtSetCurrentContext", self.context);
    }
}

struct Npu {
    server: &'static Server,
    device: Device,
}

impl Npu {
    fn new(stand_in: StandIn) -> Self {
        let mut server = Server { stand_in, context: 0, block: 0, taken: 0.into() };
        says!(server, 0, "aclInit", 0);
        let name = npu_name(0);
        says!(server, 0, "aclrtSetDevice", name.trim_start_matches("acl:").parse::<usize>().unwrap());
        server.context = made!(server, "aclrtGetCurrentContext");
        let block = made!(server, "aclrtMallocHost", (BUFFERS + 1) * STRIDE);
        // On the device it may start anywhere.
        server.block = block.next_multiple_of(64);
        Self { server: super::kept(server), device: Device::open(&name).unwrap() }
    }
}

impl Site for Npu {
    fn name(&self) -> &str {
        "a simulated Ascend device"
    }

    fn targets(&self) -> (u64, u64) {
        (if super::full() { FULL } else { USUAL }, PLAIN)
    }

    fn is_late(&self) -> bool {
        true
    }

    fn phases(&self, target: u64, phase: &mut dyn FnMut(On<'_>, Setup)) {
        for (shared, exact) in [(false, false), (false, true), (true, false), (true, true)] {
            let setup = Setup { workers: 2, exact, target: target / 4 };
            phase((&Late { server: self.server, shared }, &self.device), setup);
        }
    }

    fn engine(&self, _lag: usize) -> Box<dyn Engine> {
        self.server.enter();
        Box::new(RawStream { server: self.server, stream: made!(self.server, "aclrtCreateStream") })
    }

    fn buffer(&self) -> Words {
        // Relaxed: only a number.
        let at = self.server.taken.fetch_add(1, Ordering::Relaxed);
        assert!(at < BUFFERS, "the plain pool has given out all buffers that there are");
        // SAFETY: a part of the block, which is never freed, of the size of the cells and for them alone.
        Words::Pinned(unsafe { &*((self.server.block + at * STRIDE) as *const Cells) })
    }

    fn slot(&self) -> Words {
        self.server.enter();
        let at = made!(self.server, "aclrtMalloc", BYTES, 0);
        Words::Device(Box::new(Slot { server: self.server, at }))
    }
}

// --- the plain pool's device memory and streams
// ------------------------------------------------------------------------

struct Slot {
    server: &'static Server,
    at: usize,
}

impl Remote for Slot {
    fn write(&self, words: &[u64]) {
        self.server.enter();
        let len = size_of_val(words);
        says!(self.server, 0, "aclrtMemcpy", self.at, len, words.as_ptr(), len, HOST_TO_DEVICE);
    }

    fn read(&self, words: &mut [u64]) {
        self.server.enter();
        let len = size_of_val(words);
        says!(self.server, 0, "aclrtMemcpy", words.as_mut_ptr(), len, self.at, len, DEVICE_TO_HOST);
    }

    fn at(&self) -> u64 {
        self.at as u64
    }
}

struct RawStream {
    server: &'static Server,
    stream: usize,
}

impl Engine for RawStream {
    fn copy(&self, from: &Arc<Words>, to: &Arc<Words>, n: usize) {
        self.server.enter();
        let (len, stream) = (n * 8, self.stream);
        let start = |words: &Words| words.cells().expect("a buffer of the host's").as_ptr() as *const c_void;
        let (dst, src, kind) = match (&**from, &**to) {
            (from, Words::Device(to)) => (to.at() as usize, start(from) as usize, HOST_TO_DEVICE),
            (Words::Device(from), to) => (start(to) as usize, from.at() as usize, DEVICE_TO_HOST),
            _ => unreachable!("copies are between the host and the device"),
        };
        says!(self.server, 0, "aclrtMemcpyAsync", dst, len, src, len, kind, stream);
    }

    fn synchronize(&self) {
        self.server.enter();
        says!(self.server, 0, "aclrtSynchronizeStream", self.stream);
    }
}

// --- what the scenarios tell the device
// --------------------------------------------------------------------------------

struct Late {
    server: &'static Server,
    shared: bool,
}

impl Late {
    fn fail(&self, name: &str, code: u32, after: bool) {
        self.server.stand_in.fail(name, 1, code, after);
    }
}

impl Machine for Late {
    fn delay(&self, stream: &Stream) {
        if self.shared {
            acl::raw_stream(stream).unwrap();
        }
    }

    fn fail_copy(&self, source: DeviceSlice) -> DeviceSlice {
        self.fail("aclrtMemcpyAsync", 507_000, true);
        source
    }

    fn fail_query(&self, capture: bool) {
        self.fail("aclrtQueryEventStatus", if capture { 107_028 } else { 207_001 }, false);
    }

    fn fail_record(&self) {
        self.fail("aclrtRecordEvent", 507_000, true);
    }

    fn calm(&self) {
        self.server.stand_in.calm();
    }
}

const _: () = assert!(STRIDE >= (WORDS * 8).next_multiple_of(32) + 32);
