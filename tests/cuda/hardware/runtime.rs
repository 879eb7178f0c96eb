//! Users of the runtime API in the same primary context: their memory, streams and copies beside those of the crate.
//!
//! libcudart is loaded as a program would that was built against it. It is no part of the driver, so where there is
//! none (or only one that is newer than the driver) the test is skipped even while `PINPOOL_REQUIRE` names a GPU.
//!
//! The runtime keeps the last error of each thread until a call asks for it, and many programs ask for it after each of
//! their own calls. So no call of the crate, failed ones among them, may leave an error there, nor take the program's
//! away.

use std::collections::VecDeque;
use std::path::Path;

use pinpool::{Device, Pool, Stream};

use super::{Gpu, HANG, filled, open, pool, raw_memory, raw_stream, round_trip, until};
use crate::rig::adopt;
use crate::support::doubles::gpu::Raw;
use crate::support::kernels::{self, Kernels};
use crate::support::skip;

const NAMES: [&str; 4] =
    ["libcudart.so", "libcudart.so.13", "libcudart.so.12", "/usr/local/cuda/lib64/libcudart.so"];
const LEN: usize = 256 << 10;
const ROUNDS: u64 = 100;
/// driver_types.h: cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost; cudaStreamNonBlocking; cudaMemoryTypeHost,
/// cudaMemoryTypeDevice; cudaErrorMemoryAllocation.
const TO_DEVICE: usize = 1;
const TO_HOST: usize = 2;
const NON_BLOCKING: usize = 1;
const TYPE_HOST: u32 = 1;
const TYPE_DEVICE: u32 = 2;
const OUT_OF_MEMORY: u32 = 2;
/// How late each of the runtime's copies is.
const SPIN_NANOSECONDS: u64 = 200_000;

/// The runtime API. Its handles are numbers.
struct Runtime(Raw);

impl Runtime {
    /// The first one that works with this driver; else why there is none.
    fn load() -> Result<(Self, &'static str), String> {
        let mut why = Vec::new();
        for name in NAMES {
            match Raw::load(Path::new(name)) {
                Ok(raw) => match raw.call("cudaSetDevice", &[0]) {
                    0 => return Ok((Self(raw), name)),
                    code => why.push(format!("cudaSetDevice of {name} gave {code}")),
                },
                Err(error) => why.push(error),
            }
        }
        Err(why.join("; "))
    }

    #[track_caller]
    fn ok(&self, name: &str, arguments: &[usize]) {
        let code = self.0.call(name, arguments);
        assert_eq!(code, 0, "{name}");
    }

    #[track_caller]
    fn made(&self, name: &str, more: &[usize]) -> usize {
        let mut made = 0_usize;
        let mut arguments = vec![(&raw mut made) as usize];
        arguments.extend(more);
        self.ok(name, &arguments);
        made
    }

    /// The calling thread's last error; the call clears it.
    fn last_error(&self) -> u32 {
        self.0.call("cudaGetLastError", &[])
    }

    /// The kind of memory at an address, and its device.
    fn attributes(&self, address: usize) -> (u32, u32) {
        // cudaPointerAttributes begins with the two; the rest has grown from version to version.
        let mut attributes = [0_u32; 64];
        self.ok("cudaPointerGetAttributes", &[attributes.as_mut_ptr() as usize, address]);
        (attributes[0], attributes[1])
    }
}

/// What the rounds use.
struct Both<'a> {
    runtime: &'a Runtime,
    kernels: &'a Kernels<'a>,
    pool: &'a Pool,
    /// The runtime's memory, on the device and pinned on the host.
    memory: usize,
    landing: usize,
}

impl Both<'_> {
    /// Copies of the crate and of the runtime by turns on one stream; returns how many bytes were wrong.
    fn rounds(&self, stream: &Stream, raw: usize, slice: &pinpool::DeviceSlice) -> usize {
        let (runtime, mut wrong, mut landing) = (self.runtime, 0, VecDeque::new());
        for round in 0..ROUNDS {
            // A copy of the crate, read by the runtime.
            self.kernels.spin(SPIN_NANOSECONDS, raw);
            drop(stream.upload(filled(self.pool, LEN, round), slice).expect("an upload"));
            runtime.ok("cudaMemcpyAsync", &[self.landing, self.memory, LEN, TO_HOST, raw]);
            runtime.ok("cudaStreamSynchronize", &[raw]);
            // SAFETY: pinned memory of the runtime's of that length, and the copy there was waited for.
            let landed = unsafe { std::slice::from_raw_parts(self.landing as *const u8, LEN) };
            wrong += kernels::wrong(landed, round);
            // A copy of the runtime, from a buffer of the pool that only a hold keeps, read by the crate.
            let seed = round + 1_000_000;
            let buf = filled(self.pool, LEN, seed);
            self.kernels.spin(SPIN_NANOSECONDS, raw);
            runtime.ok("cudaMemcpyAsync", &[self.memory, buf.as_ptr() as usize, LEN, TO_DEVICE, raw]);
            drop(stream.hold(buf).expect("a hold"));
            // Overwrites the buffer, if it returned too early.
            drop(filled(self.pool, LEN, seed + 1));
            let back = self.pool.checkout_timeout(LEN, HANG).expect("the pool has room");
            landing.push_back((stream.download(slice, back).expect("a download"), seed));
            if landing.len() > 4 {
                wrong += landing.pop_front().map_or(0, wrong_in);
            }
        }
        wrong + landing.into_iter().map(wrong_in).sum::<usize>()
    }
}

fn wrong_in((flight, seed): (pinpool::InFlight<pinpool::PinnedBuf>, u64)) -> usize {
    kernels::wrong(&flight.wait().expect("it lands"), seed)
}

pub fn beside(gpu: &Gpu) {
    const TEST: &str = "the_runtime_api_works_beside_the_pool";
    let device = open(0);
    let pool = pool(&device);
    let (runtime, name) = match Runtime::load() {
        Ok(found) => found,
        // Not a part of the driver.
        Err(why) => return skip!("there is no libcudart for this driver: {why}"),
    };
    let mut version = 0_u32;
    runtime.ok("cudaRuntimeGetVersion", &[(&raw mut version) as usize]);
    println!("{TEST}: {name}, CUDA {version}");
    // Makes the runtime initialise, if setting the device did not.
    runtime.ok("cudaFree", &[0]);
    let ours = pinpool::cuda::raw_context(&device).expect("a GPU") as usize;
    assert_eq!(gpu.raw.current(), ours, "the runtime works in another context");
    let kernels = gpu.kernels().expect("a real GPU");

    let (memory, landing) = (runtime.made("cudaMalloc", &[LEN]), runtime.made("cudaMallocHost", &[LEN]));
    let theirs = runtime.made("cudaStreamCreateWithFlags", &[NON_BLOCKING]);
    let slice = raw_memory(&device, memory as u64, LEN).expect("the runtime's memory");
    let adopted = adopt(&device, theirs).expect("the runtime's stream");
    let own = device.stream().expect("a stream");
    let given = raw_stream(&own);
    let both = Both { runtime: &runtime, kernels: &kernels, pool: &pool, memory, landing };
    let wrong = both.rounds(&adopted, theirs, &slice) + both.rounds(&own, given, &slice);
    assert_eq!(wrong, 0, "wrong bytes");
    assert_eq!(runtime.last_error(), 0);

    // Each side knows the other's memory.
    let buf = pool.checkout(4096).expect("a buffer");
    let at = device.alloc(4096).expect("device memory");
    assert_eq!(runtime.attributes(buf.as_ptr() as usize).0, TYPE_HOST);
    assert_eq!(runtime.attributes(at.address() as usize), (TYPE_DEVICE, 0));
    raw_memory(&device, landing as u64, LEN).expect_err("it is the host's");
    drop((buf, at));

    let refusals = refused(gpu, &runtime, &device, &pool, &adopted);
    let mut none = 0_usize;
    let refused = runtime.0.call("cudaMalloc", &[(&raw mut none) as usize, 1 << 60]);
    assert_eq!(refused, OUT_OF_MEMORY);
    // The crate neither reports the runtime's own error nor takes it away.
    let back = device.alloc(LEN).expect("device memory");
    assert_eq!(round_trip(&pool, &adopted, &back, 7), 0);
    assert_eq!((runtime.last_error(), runtime.last_error()), (OUT_OF_MEMORY, 0));

    adopted.synchronize().expect("all is done");
    until("all is back", || pool.stats().in_flight_bytes == 0);
    assert_eq!((pool.stats().quarantined_bytes, device.lost()), (0, None), "{:?}", pool.stats());
    drop((slice, adopted, own, back));
    for (call, what) in [("cudaStreamDestroy", theirs), ("cudaFree", memory), ("cudaFreeHost", landing)] {
        runtime.ok(call, &[what]);
    }
    pool.check().expect("the pool is whole");
    drop((pool, device));
    assert_eq!(runtime.last_error(), 0);
    println!(
        "{TEST}: {} copies of ours and of the runtime's by turns on a stream of each, 0 wrong bytes; {refusals} refusals \
         left no error behind",
        8 * ROUNDS
    );
}

type Failing<'a> = Box<dyn FnOnce() -> pinpool::Error + 'a>;

/// Calls of the crate that fail, each followed by what the runtime says of it, and by calls of the runtime that must
/// work.
fn refused(gpu: &Gpu, runtime: &Runtime, device: &Device, pool: &Pool, stream: &Stream) -> usize {
    let registered = vec![0_u8; 1 << 20];
    let at = registered.as_ptr().cast_mut();
    gpu.raw.register(at, registered.len());
    let gone = runtime.made("cudaMalloc", &[64 << 20]);
    let slice = raw_memory(device, gone as u64, 64 << 20).expect("the runtime's memory");
    runtime.ok("cudaFree", &[gone]);
    let twice = || {
        let refused = device.register(registered).expect_err("it is registered");
        let memory = refused.buffer.expect("it comes back");
        gpu.raw.unregister(memory.as_ptr().cast_mut());
        refused.error
    };
    let into_nothing = || stream.upload(filled(pool, LEN, 1), slice).expect_err("its memory is gone").error;
    let too_much = || device.alloc(1 << 60).expect_err("no GPU has as much");
    let nobodys = || raw_memory(device, 0x10, 8).expect_err("no memory");
    let calls: [(&str, Failing<'_>); 4] = [
        ("registering twice", Box::new(twice)),
        ("an upload to memory that is gone", Box::new(into_nothing)),
        ("an allocation of 1 EiB", Box::new(too_much)),
        ("memory at 0x10", Box::new(nobodys)),
    ];
    let count = calls.len();
    for (what, call) in calls {
        let error = call();
        println!("{what}: {error}");
        assert!(!error.is_device_lost(), "{error}");
        assert_eq!(runtime.0.call("cudaPeekAtLastError", &[]), 0, "{what} left an error behind");
        let memory = runtime.made("cudaMalloc", &[4096]);
        runtime.ok("cudaMemset", &[memory, 0, 4096]);
        runtime.ok("cudaFree", &[memory]);
        runtime.ok("cudaDeviceSynchronize", &[]);
        assert_eq!(runtime.last_error(), 0, "{what} left an error behind");
    }
    count
}
