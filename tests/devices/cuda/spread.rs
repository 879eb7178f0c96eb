//! The kernels that spread packed bytes over device memory and collect them: each byte compared with a plain
//! model, on a real GPU and on the stand-in; and their trouble, on the stand-in. They are reached by
//! `pinpool::cuda::spread`, which is for these tests.

#![allow(unsafe_code, reason = "launching kernels and calling the driver")]

use std::ffi::c_void;
use std::time::{Duration, Instant};

use pinpool::cuda::{self, spread};
use pinpool::{Device, Error, ErrorClass};

use crate::cuda::rig::open;
use crate::support::doubles::gpu::{Gpu, calls, on_driver, on_gpu, on_stand_in};
use crate::support::doubles::{HANG, StandIn, gpu_name};
use crate::support::kernels::Kernels;
use crate::support::{bytes, skip};
use pinpool_sim::cuda::Driver;

/// Where a row is among the places, where among the packed bytes, and how long it is.
#[derive(Clone, Copy, Debug)]
struct Row {
    place: usize,
    offset: usize,
    len: usize,
}

/// Rows of several runs, all places in one block of memory, the packed bytes of all runs in another one. What no row
/// names guards what is beside it.
struct Case {
    /// Bytes of each block.
    len: usize,
    /// Where its packed bytes begin, and its rows.
    runs: Vec<(usize, Vec<Row>)>,
}

impl Case {
    /// Of each row: its length, and the remainders modulo 64 of where its place and its packed bytes begin. The places
    /// are in another order than the packed bytes. The rows are dealt out to that many runs.
    fn new(rows: &[(usize, usize, usize)], runs: usize) -> Self {
        let longest = rows.iter().map(|row| row.0).max().unwrap_or(0);
        // With a guard between two.
        let slot = longest.next_multiple_of(64) + 128;
        // A permutation, since 7919 is a prime that divides no number of rows used here.
        assert!(rows.len() % 7919 != 0);
        let row = |(i, &(len, place, offset)): (usize, &(usize, usize, usize))| {
            let other = i * 7919 % rows.len();
            Row { place: other * slot + place, offset: i * slot + offset, len }
        };
        let all: Vec<Row> = rows.iter().enumerate().map(row).collect();
        let runs = all.chunks(all.len().div_ceil(runs)).map(|rows| {
            // Some bytes before its first row's.
            let start = rows[0].offset - rows[0].offset.min(rows[0].place % 5);
            (start, rows.to_vec())
        });
        Self { len: rows.len() * slot, runs: runs.collect() }
    }
}

/// One in so many cases: the simulation has no kernels of its own to get wrong.
fn one_in(gpu: &Gpu) -> usize {
    if gpu.stand_in.is_some() { 31 } else { 1 }
}

struct Spreader<'a> {
    gpu: &'a Gpu,
    device: Device,
    stream: usize,
}

impl<'a> Spreader<'a> {
    fn new(gpu: &'a Gpu) -> Self {
        let device = open();
        spread::load(&device).unwrap();
        let stream = spread::urgent_stream(&device).unwrap() as usize;
        Self { gpu, device, stream }
    }

    fn launch(&self, collect: bool, runs: &[(u64, u64, u32)]) -> Result<(), Error> {
        // SAFETY: what the tests name is there until they have waited for the stream, except where the
        // stand-in is to find that it is not.
        unsafe { spread::launch(&self.device, self.stream as *mut c_void, collect, runs) }
    }

    /// A new allocation with these bytes.
    fn memory(&self, bytes: &[u8]) -> usize {
        let at = self.gpu.memory(bytes.len());
        self.gpu.upload(at, bytes.as_ptr(), bytes.len(), self.stream);
        at
    }

    fn free(&self, memory: &[usize]) {
        memory.iter().for_each(|at| self.gpu.ok("cuMemFree_v2", &[*at]));
    }

    /// Both ways, each on fresh bytes: every byte of both sides is as the model has it.
    fn check(&self, case: &Case) {
        for collect in [false, true] {
            let (mut places, mut packed) = (bytes(3, case.len), bytes(7, case.len));
            let at = [self.memory(&places), self.memory(&packed)];
            let (mut tables, mut runs) = (Vec::new(), Vec::new());
            for (start, rows) in &case.runs {
                let row = |row: &Row| {
                    spread::row((at[0] + row.place) as u64, (row.offset - start) as u32, row.len as u32)
                };
                tables.push(self.memory(&rows.iter().flat_map(row).collect::<Vec<_>>()));
                runs.push(((at[1] + start) as u64, tables[tables.len() - 1] as u64, rows.len() as u32));
            }
            self.launch(collect, &runs).unwrap();
            for &Row { place, offset, len } in case.runs.iter().flat_map(|(_, rows)| rows) {
                if collect {
                    packed[offset..][..len].copy_from_slice(&places[place..][..len]);
                } else {
                    places[place..][..len].copy_from_slice(&packed[offset..][..len]);
                }
            }
            for (name, at, expected) in [("places", at[0], &places), ("packed", at[1], &packed)] {
                let found = self.gpu.read(at, expected.len(), self.stream);
                let wrong = (0..found.len()).find(|i| found[*i] != expected[*i]);
                assert_eq!(wrong, None, "collect {collect}: {name}, of {:?}", case.runs);
            }
            self.free(&at);
            self.free(&tables);
        }
    }

    fn end(self) {
        self.gpu.ok("cuStreamDestroy_v2", &[self.stream]);
    }
}

#[test]
fn rows_of_all_alignments_and_many_lengths() {
    on_gpu(|gpu| {
        let spreader = Spreader::new(gpu);
        // In parts, so that the blocks of memory stay small.
        for place in (0..32).step_by(one_in(gpu)) {
            let rows: Vec<_> =
                (0..32).flat_map(|offset| (0..=100).map(move |len| (len, place, offset))).collect();
            spreader.check(&Case::new(&rows, 1 + place % 3));
        }
        // Around what the lanes of a warp copy at once, in bytes, words of 4 and of 16 bytes.
        let around = [127, 128, 256, 384, 512, 1536, 2047, 2048, 2080, 4096, 1_000_000];
        let alignments = [0, 1, 2, 3, 4, 8, 12, 13, 15, 16, 17, 30];
        for len in around.into_iter().flat_map(|len| [len - 1, len, len + 1, len + 17]).step_by(one_in(gpu)) {
            let few = if len > 5000 { 1 } else { alignments.len() };
            let places = alignments.iter().take(few);
            let rows = places.flat_map(|place| alignments.map(|offset| (len, *place, offset)));
            spreader.check(&Case::new(&rows.collect::<Vec<_>>(), 5));
        }
        // As many runs as there may be, and numbers of rows around that of the warps and their lanes.
        for (count, runs) in [(20_000, 1), (20_000, 32), (255, 2), (256, 32), (257, 3), (8193, 31)] {
            let rows = (0..count / one_in(gpu)).map(|i| (200 + i % 7, i % 3 * 16, i % 5 * 4));
            spreader.check(&Case::new(&rows.collect::<Vec<_>>(), runs));
        }
        spreader.end();
    });
}

/// Numbers of more than 31 bits: an offset, and a length. On a real GPU, which has room for them.
#[test]
fn rows_beyond_two_gib() {
    on_gpu(|gpu| {
        if gpu.stand_in.is_some() {
            return skip!("the stand-in has no room for gigabytes");
        }
        const LONG: usize = (1 << 31) + 77;
        const LAST: usize = 3 << 30;
        const SHORT: usize = 1000;
        let spreader = Spreader::new(gpu);
        let (packed, places) = (gpu.memory(LAST + SHORT), gpu.memory(LONG + 64 + SHORT));
        let stream = spreader.stream;
        gpu.ok("cuMemsetD8Async", &[packed, 0x11, LAST + SHORT, stream]);
        gpu.ok("cuMemsetD8Async", &[places, 0xEE, LONG + 64 + SHORT, stream]);
        let ends = [bytes(1, SHORT), bytes(2, SHORT), bytes(3, SHORT)];
        for (at, bytes) in [3, LONG + 3 - SHORT, LAST].iter().zip(&ends) {
            gpu.upload(packed + at, bytes.as_ptr(), SHORT, stream);
        }
        let short = places + LONG + 40;
        let rows = [
            spread::row((places + 3) as u64, 3, LONG as u32),
            spread::row(short as u64, LAST as u32, SHORT as u32),
        ];
        let table = spreader.memory(rows.as_flattened());
        spreader.launch(false, &[(packed as u64, table as u64, 2)]).unwrap();
        let read = |at: usize| gpu.read(at, SHORT, stream);
        assert!([places + 3, places + LONG + 3 - SHORT, short].map(read) == ends);
        assert!(read(places + LONG / 2).iter().all(|byte| *byte == 0x11));
        assert_eq!(gpu.read(places, 3, stream), [0xEE; 3]);
        assert_eq!(gpu.read(places + LONG + 3, 37, stream), [0xEE; 37]);
        gpu.ok("cuMemsetD8Async", &[packed, 0x22, LAST + SHORT, stream]);
        spreader.launch(true, &[(packed as u64, table as u64, 2)]).unwrap();
        assert!([packed + 3, packed + LONG + 3 - SHORT, packed + LAST].map(read) == ends);
        assert!(read(packed + LONG + 3).iter().all(|byte| *byte == 0x22));
        spreader.free(&[packed, places, table]);
        spreader.end();
    });
}

#[test]
fn a_launch_takes_so_many_runs_on_a_stream_of_the_greatest_priority() {
    on_gpu(|gpu| {
        let spreader = Spreader::new(gpu);
        // Nothing to do: no memory is looked at.
        spreader.launch(false, &[]).unwrap();
        spreader.launch(true, &[(0, 0, 0); 40]).unwrap();
        let refused = spreader.launch(false, &[(0, 0, 1); 33]).unwrap_err();
        assert!(
            matches!(&refused, Error::Unsupported(text) if text.contains("32 runs at most, not 33")),
            "{refused}"
        );
        // And nothing was launched, which would have ended the context.
        gpu.ok("cuStreamSynchronize", &[spreader.stream]);
        let (mut least, mut greatest, mut priority) = (0_i32, 0_i32, 0_i32);
        let range = [(&raw mut least) as usize, (&raw mut greatest) as usize];
        gpu.ok("cuCtxGetStreamPriorityRange", &range);
        gpu.ok("cuStreamGetPriority", &[spreader.stream, (&raw mut priority) as usize]);
        assert_eq!(priority, greatest);
        println!("priorities from {least} to {greatest}");
        for name in ["cuCtxGetStreamPriorityRange", "cuStreamCreateWithPriority"] {
            let Some(d) = &gpu.stand_in else { break };
            d.fail(name, 1, 2, false);
            let refused = spread::urgent_stream(&spreader.device).unwrap_err();
            assert_eq!(refused.class(), ErrorClass::Transient, "{refused}");
            assert!(refused.to_string().contains(name), "{refused}");
        }
        spreader.end();
    });
}

/// The functions are loaded before their first launch: a driver that loads one then waits for whatever runs.
#[test]
fn a_first_launch_waits_for_no_other_kernel() {
    on_gpu(|gpu| {
        if gpu.stand_in.is_some() {
            return skip!("the stand-in has no kernels that run for long");
        }
        let raw = StandIn::of_this_process();
        let (kernels, busy) = (Kernels::load(&raw), gpu.stream());
        kernels.spin(1000, busy);
        gpu.ok("cuStreamSynchronize", &[busy]);
        let spreader = Spreader::new(gpu);
        let memory = spreader.memory(&bytes(1, 4096));
        let table = spreader.memory(&spread::row(memory as u64 + 2048, 0, 1000));
        gpu.ok("cuStreamSynchronize", &[spreader.stream]);
        let since = Instant::now();
        kernels.spin(2_000_000_000, busy);
        for collect in [false, true] {
            spreader.launch(collect, &[(memory as u64, table as u64, 1)]).unwrap();
        }
        gpu.ok("cuStreamSynchronize", &[spreader.stream]);
        let took = since.elapsed();
        gpu.ok("cuStreamSynchronize", &[busy]);
        println!("beside a kernel of {:?} two launches took {took:?}", since.elapsed());
        assert!(took < Duration::from_secs(1) && since.elapsed() > Duration::from_secs(2));
        spreader.free(&[memory, table]);
        gpu.ok("cuStreamDestroy_v2", &[busy]);
        spreader.end();
    });
}

/// With drivers that lack calls, and in an adopted context, the module is gone before the context's owner
/// hears of the end.
#[test]
fn kernels_in_an_adopted_context_are_unloaded_at_its_end() {
    on_driver(Driver::Cuda11_0, unloaded_at_the_end);
    on_gpu(unloaded_at_the_end);
}

fn unloaded_at_the_end(gpu: &Gpu) {
    let context = gpu.other_context();
    for round in 0..3 {
        let (tell, ended) = std::sync::mpsc::channel::<()>();
        // SAFETY: the context is destroyed below, when the sender was dropped.
        let device = unsafe { cuda::adopt_context(context as *mut c_void, tell) }.unwrap();
        gpu.current(context);
        spread::load(&device).unwrap();
        let stream = spread::urgent_stream(&device).unwrap() as usize;
        let spreader = Spreader { gpu, device, stream };
        spreader.check(&Case::new(&[(100, 1, 2), (3000, round, 16), (0, 0, 0)], 2));
        spreader.end();
        // The sender is dropped: nothing calls the driver in this context any more.
        assert!(ended.recv().is_err());
        if let Some(stand_in) = &gpu.stand_in {
            let leaks = stand_in.report().leaks;
            assert!(!leaks.iter().any(|leak| leak.starts_with("modules")), "{leaks:?}");
        }
    }
    gpu.current(gpu.context);
    gpu.ok("cuCtxDestroy_v2", &[context]);
}

#[test]
fn a_driver_that_refuses_the_kernels_is_asked_once() {
    on_stand_in(|_, d| {
        let faults = [("cuModuleLoadData", 1, 218), ("cuModuleGetFunction", 2, 209), ("cuFuncLoad", 1, 2)];
        for (name, nth, code) in faults {
            let device = open();
            d.fail(name, nth, code, false);
            let before = calls(d, "cuModuleLoadData");
            for _ in 0..2 {
                let refused = spread::load(&device).unwrap_err();
                let Error::Unsupported(text) = &refused else { panic!("{refused}") };
                assert!(text.contains(name) && text.contains(&*gpu_name(0)), "{text}");
            }
            assert_eq!(calls(d, "cuModuleLoadData"), before + 1, "{name}");
            assert!(device.lost().is_none());
            let leaks = d.report().leaks;
            assert!(!leaks.iter().any(|leak| leak.starts_with("modules")), "{name}: {leaks:?}");
            device.close(HANG).unwrap();
        }
        // Opened anew it may have them.
        spread::load(&open()).unwrap();
    });
}

/// While the kernels are loaded, by a launch itself, or by the kernel.
#[test]
fn a_device_is_lost_by_a_launch_or_behind_it() {
    let is_lost = |said: Result<(), Error>| said.is_err_and(|error| error.class() == ErrorClass::DeviceLost);
    on_stand_in(|_, d| {
        let device = open();
        d.fail("cuModuleLoadData", 1, 700, true);
        assert!(is_lost(spread::load(&device)) && is_lost(spread::load(&device)) && device.lost().is_some());
    });
    for (by_launch, code) in [(true, 719), (false, 700)] {
        on_stand_in(|gpu, d| {
            let spreader = Spreader::new(gpu);
            let memory = spreader.memory(&bytes(1, 4096)) as u64;
            let table = spreader.memory(&spread::row(if by_launch { memory + 2048 } else { 64 }, 0, 1000));
            let runs = [(memory, table as u64, 1)];
            if by_launch {
                d.fail("cuLaunchKernel", 1, code, true);
            }
            assert_eq!(is_lost(spreader.launch(false, &runs)), by_launch);
            assert_eq!(gpu.call("cuStreamSynchronize", &[spreader.stream]), code);
            assert!(is_lost(spreader.launch(false, &runs)) && spreader.device.lost().is_some());
            let closed = spreader.device.close(HANG).unwrap_err();
            assert!(closed.is_closed(), "{closed}");
        });
    }
}
