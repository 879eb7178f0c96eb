//! Users of the runtime API in the same primary context: their memory, streams and copies beside those of the
//! crate.
//!
//! libcudart is loaded as a program would that was built against it. It is no part of the driver, so where
//! there is none (or only one that is newer than the driver) the test is skipped even while `PINPOOL_REQUIRE`
//! names a GPU.
//!
//! The runtime keeps the last error of each thread until a call asks for it, and many programs ask for it
//! after each of their own calls. So no call of the crate, failed ones among them, may leave an error there,
//! nor take the program's away.

use std::path::Path;

use pinpool::{Device, Pool, Stream};

use super::{HANG, StandIn, filled, kernels_of, open, pool, raw_memory, raw_stream, round_trip, until};
use crate::cuda::rig::adopt;
use crate::support::kernels;
use crate::support::skip;

const NAMES: [&str; 4] =
    ["libcudart.so", "libcudart.so.13", "libcudart.so.12", "/usr/local/cuda/lib64/libcudart.so"];
const LEN: usize = 256 << 10;
const ROUNDS: u64 = 100;
/// driver_types.h: cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost; cudaStreamNonBlocking; cudaErrorMemoryAllocation.
const TO_DEVICE: usize = 1;
const TO_HOST: usize = 2;
const NON_BLOCKING: usize = 1;
const OUT_OF_MEMORY: u32 = 2;
/// How late each of the runtime's copies is.
const SPIN_NANOSECONDS: u64 = 200_000;

/// The runtime API. Its handles are numbers.
struct Runtime(StandIn);

impl Runtime {
    /// The first one that works with this driver; else why there is none.
    fn load() -> Result<Self, String> {
        let mut why = Vec::new();
        for name in NAMES {
            match StandIn::any(Path::new(name)) {
                Ok(raw) => match raw.call("cudaSetDevice", &[0]) {
                    0 => return Ok(Self(raw)),
                    code => why.push(format!("cudaSetDevice of {name} gave {code}")),
                },
                Err(error) => why.push(error),
            }
        }
        Err(why.join("; "))
    }

    /// The calling thread's last error; the call clears it.
    fn last_error(&self) -> u32 {
        self.0.call("cudaGetLastError", &[])
    }
}

pub fn beside(driver: &StandIn) {
    let device = open(0);
    let pool = pool(&device);
    let runtime = match Runtime::load() {
        Ok(found) => found,
        // Not a part of the driver.
        Err(why) => return skip!("there is no libcudart for this driver: {why}"),
    };
    // Makes the runtime initialise, if setting the device did not.
    runtime.0.ok("cudaFree", &[0]);
    let ours = pinpool::cuda::raw_context(&device).expect("a GPU") as usize;
    assert_eq!(driver.made("cuCtxGetCurrent", &[]), ours, "the runtime works in another context");
    let kernels = kernels_of(driver, 0);
    // The runtime's memory, on the device and pinned on the host.
    let (memory, landing) = (runtime.0.made("cudaMalloc", &[LEN]), runtime.0.made("cudaMallocHost", &[LEN]));
    let theirs = runtime.0.made("cudaStreamCreateWithFlags", &[NON_BLOCKING]);
    let slice = raw_memory(&device, memory as u64, LEN).expect("the runtime's memory");
    let adopted = adopt(&device, theirs).expect("the runtime's stream");
    let own = device.stream().expect("a stream");
    let legacy = adopt(&device, 0).expect("the legacy default stream");
    // Copies of the crate and of the runtime in alternation, on a stream of each, and on the legacy default stream.
    for (stream, raw) in [(&adopted, theirs), (&own, raw_stream(&own)), (&legacy, 0)] {
        for round in 0..ROUNDS {
            // A copy of the crate, read by the runtime.
            kernels.spin(SPIN_NANOSECONDS, raw);
            drop(stream.upload(filled(&pool, LEN, round), &slice).expect("an upload"));
            runtime.0.ok("cudaMemcpyAsync", &[landing, memory, LEN, TO_HOST, raw]);
            runtime.0.ok("cudaStreamSynchronize", &[raw]);
            // SAFETY: pinned memory of the runtime's of that length, and the copy there was waited for.
            let landed = unsafe { std::slice::from_raw_parts(landing as *const u8, LEN) };
            assert_eq!(kernels::wrong(landed, round), 0, "round {round}");
            // A copy of the runtime, from a buffer of the pool that only a hold keeps, read by the crate.
            let seed = round + 1_000_000;
            let buf = filled(&pool, LEN, seed);
            kernels.spin(SPIN_NANOSECONDS, raw);
            runtime.0.ok("cudaMemcpyAsync", &[memory, buf.as_ptr() as usize, LEN, TO_DEVICE, raw]);
            drop(stream.hold(buf).expect("a hold"));
            // Overwrites the buffer, if it returned too early.
            drop(filled(&pool, LEN, seed + 1));
            let back = pool.checkout_timeout(LEN, HANG).expect("the pool has room");
            let back = stream.download(&slice, back).expect("a download").wait().expect("it lands");
            assert_eq!(kernels::wrong(&back, seed), 0, "round {round}");
        }
    }
    assert_eq!(runtime.last_error(), 0);
    raw_memory(&device, landing as u64, LEN).expect_err("it is the host's");
    refused(driver, &runtime, &device, &pool, &adopted);
    let mut none = 0_usize;
    let refused = runtime.0.call("cudaMalloc", &[(&raw mut none) as usize, 1 << 60]);
    assert_eq!(refused, OUT_OF_MEMORY);
    // The crate neither reports the runtime's own error nor takes it away.
    let back = device.alloc(LEN).expect("device memory");
    round_trip(&pool, &adopted, &back, 7);
    assert_eq!((runtime.last_error(), runtime.last_error()), (OUT_OF_MEMORY, 0));

    adopted.synchronize().expect("all is done");
    until("all is back", || pool.stats().in_flight_bytes == 0);
    assert_eq!((pool.stats().quarantined_bytes, device.lost()), (0, None), "{:?}", pool.stats());
    drop((slice, adopted, own, legacy, back));
    for (call, what) in [("cudaStreamDestroy", theirs), ("cudaFree", memory), ("cudaFreeHost", landing)] {
        runtime.0.ok(call, &[what]);
    }
    drop((pool, device));
    assert_eq!(runtime.last_error(), 0);
}

/// Calls of the crate that fail, each followed by what the runtime says of it, and by calls of the runtime
/// that must work.
fn refused(driver: &StandIn, runtime: &Runtime, device: &Device, pool: &Pool, stream: &Stream) {
    let leaves_nothing = |what: &str, error: pinpool::Error| {
        println!("{what}: {error}");
        assert!(!error.is_device_lost(), "{error}");
        assert_eq!(runtime.0.call("cudaPeekAtLastError", &[]), 0, "{what} left an error behind");
        let memory = runtime.0.made("cudaMalloc", &[4096]);
        runtime.0.ok("cudaMemset", &[memory, 0, 4096]);
        runtime.0.ok("cudaFree", &[memory]);
        runtime.0.ok("cudaDeviceSynchronize", &[]);
        assert_eq!(runtime.last_error(), 0, "{what} left an error behind");
    };
    let registered = vec![0_u8; 1 << 20];
    driver.ok("cuMemHostRegister_v2", &[registered.as_ptr() as usize, registered.len(), 1]);
    let refused = device.register(registered).expect_err("it is registered");
    let back = refused.buffer.expect("it comes back");
    driver.ok("cuMemHostUnregister", &[back.as_ptr() as usize]);
    leaves_nothing("registering twice", refused.error);
    let gone = runtime.0.made("cudaMalloc", &[64 << 20]);
    let slice = raw_memory(device, gone as u64, 64 << 20).expect("the runtime's memory");
    runtime.0.ok("cudaFree", &[gone]);
    let refused = stream.upload(filled(pool, LEN, 1), slice).expect_err("its memory is gone");
    leaves_nothing("an upload to memory that is gone", refused.error);
    leaves_nothing("an allocation of 1 EiB", device.alloc(1 << 60).expect_err("no GPU has as much"));
    leaves_nothing("memory at 0x10", raw_memory(device, 0x10, 8).expect_err("no memory"));
}
