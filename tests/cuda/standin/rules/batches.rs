//! Rules of the stand-in about batches of copies.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::standin::probe::Driver;

/// cuda.h's `CUmemcpyAttributes`: sources are read in stream order, nothing is said about locations.
const IN_STREAM_ORDER: [u32; 6] = [1, 0, 0, 0, 0, 0];

/// Lists of a batch: targets, sources, lengths.
struct Lists(Vec<usize>, Vec<usize>, Vec<usize>);

impl Lists {
    /// `count` copies of `len` bytes from `bytes` to `memory`, next to each other.
    fn new(memory: usize, bytes: &[u8], count: usize, len: usize) -> Self {
        let places = |start: usize| (0..count).map(|i| start + i * len).collect();
        Self(places(memory), places(bytes.as_ptr() as usize), vec![len; count])
    }
}

impl Driver {
    /// A step that submits a batch with the form of 12.8, and where it failed.
    fn batch(&self, code: u32, Lists(targets, sources, lengths): &Lists, stream: usize) -> usize {
        self.batch_with(code, targets, sources, lengths, &[(0, IN_STREAM_ORDER)], stream)
    }

    fn batch_with(
        &self,
        code: u32,
        targets: &[usize],
        sources: &[usize],
        lengths: &[usize],
        sets: &[(usize, [u32; 6])],
        stream: usize,
    ) -> usize {
        let (firsts, attributes): (Vec<usize>, Vec<[u32; 6]>) = sets.iter().copied().unzip();
        let mut fault = 7_usize;
        says!(
            self,
            code,
            "cuMemcpyBatchAsync",
            targets.as_ptr(),
            sources.as_ptr(),
            lengths.as_ptr(),
            targets.len(),
            attributes.as_ptr(),
            firsts.as_ptr(),
            sets.len(),
            &raw mut fault,
            stream
        );
        fault
    }
}

rules! {
    BATCHES:

    bat_1_not_on_the_default_stream (ready) |d| {
        let (stream, memory, mut bytes) = (d.stream(), d.memory(4096), d.pages(1, 5));
        assert_eq!(d.register(&mut bytes), 0);
        let lists = Lists::new(memory, &bytes, 4, 1024);
        d.batch(1, &lists, 0);
        d.broken(&["BAT-1"]);
        // On another it is all copied.
        d.batch(0, &lists, stream);
        let mut back = d.pages(1, 0);
        assert_eq!(d.download(&mut back, memory, stream), 0);
        says!(d, 0, "cuStreamSynchronize", stream);
        assert!(*back == *bytes);
        assert_eq!(call!(d, "cuMemHostUnregister", bytes.as_mut_ptr()), 0);
    }

    bat_2_a_copy_has_bytes (ready) |d| {
        let (stream, memory, mut bytes) = (d.stream(), d.memory(4096), d.pages(1, 6));
        assert_eq!(d.register(&mut bytes), 0);
        let mut lists = Lists::new(memory, &bytes, 4, 1024);
        lists.2[2] = 0;
        d.batch(1, &lists, stream);
        d.broken(&["BAT-2"]);
        d.finish(stream);
        if d.is_stand_in() {
            assert_eq!(call!(d, "cuStreamSynchronize", stream), 0);
        }
        assert_eq!(call!(d, "cuMemHostUnregister", bytes.as_mut_ptr()), 0);
    }

    bat_3_not_in_a_capture (ready) |d| {
        let (stream, memory, mut bytes) = (d.stream(), d.memory(4096), d.pages(1, 7));
        assert_eq!(d.register(&mut bytes), 0);
        let lists = Lists::new(memory, &bytes, 4, 1024);
        let mut graph = 0_usize;
        says!(d, 0, "cuStreamBeginCapture_v2", stream, 2);
        d.batch(900, &lists, stream);
        says!(d, 0, "cuStreamEndCapture", stream, &raw mut graph);
        says!(d, 0, "cuGraphDestroy", graph);
        d.broken(&["BAT-3"]);
        assert_eq!(call!(d, "cuMemHostUnregister", bytes.as_mut_ptr()), 0);
    }

    bat_4_no_copy_writes_where_another_one_does (ready) |d| {
        let (stream, memory, mut bytes) = (d.stream(), d.memory(4096), d.pages(1, 8));
        assert_eq!(d.register(&mut bytes), 0);
        let mut lists = Lists::new(memory, &bytes, 3, 1024);
        lists.0[2] = memory + 100;
        d.batch(0, &lists, stream);
        d.broken(&["BAT-4"]);
        assert_eq!(call!(d, "cuStreamSynchronize", stream), 0);
        assert_eq!(call!(d, "cuMemHostUnregister", bytes.as_mut_ptr()), 0);
    }

    bat_5_each_copy_has_attributes (ready) |d| {
        let (stream, memory, mut bytes) = (d.stream(), d.memory(4096), d.pages(1, 9));
        assert_eq!(d.register(&mut bytes), 0);
        let Lists(targets, sources, lengths) = Lists::new(memory, &bytes, 4, 1024);
        let batch = |code, sets: &[_]| d.batch_with(code, &targets, &sources, &lengths, sets, stream);
        batch(0, &[(0, IN_STREAM_ORDER), (3, IN_STREAM_ORDER)]);
        batch(1, &[(1, IN_STREAM_ORDER)]);
        batch(1, &[(0, IN_STREAM_ORDER), (0, IN_STREAM_ORDER)]);
        batch(1, &[(0, [0; 6])]);
        d.broken(&["BAT-5"; 3]);
        assert_eq!(call!(d, "cuStreamSynchronize", stream), 0);
        assert_eq!(call!(d, "cuMemHostUnregister", bytes.as_mut_ptr()), 0);
    }

    bat_6_one_call_at_a_time (ready) |d| {
        let (stream, memory, mut bytes) = (d.stream(), d.memory(4096), d.pages(1, 5));
        assert_eq!(d.register(&mut bytes), 0);
        let (lists, is_seen) = (Lists::new(memory, &bytes, 4, 1024), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                d.enter();
                d.current(0);
                while !is_seen.load(Ordering::Relaxed) {
                    d.batch(0, &lists, stream);
                }
            });
            // The calls meet sooner or later.
            while d.stand_in.report().violations.is_empty() {
                d.batch(0, &lists, stream);
            }
            is_seen.store(true, Ordering::Relaxed);
        });
        says!(d, 0, "cuStreamSynchronize", stream);
        assert!(d.stand_in.report().violations.iter().all(|found| found.starts_with("BAT-6 ")));
    }

    /// Calls that say which side is host memory take the host's address all the same.
    bat_7_the_devices_address_where_it_is_another (ready) |d| {
        let (stream, memory, mut bytes) = (d.stream(), d.memory(4096), d.pages(1, 5));
        d.registers(0, &mut bytes);
        if d.is_stand_in() {
            d.stand_in.attribute(91, 0);
        }
        let there = made!(d, "cuMemHostGetDevicePointer_v2", bytes.as_ptr(), 0);
        assert_eq!(there == bytes.as_ptr() as usize, !d.is_stand_in());
        d.batch(0, &Lists(vec![memory, memory + 64], vec![there, there + 64], vec![64; 2]), stream);
        d.downloads(0, &mut bytes, memory, stream);
        says!(d, 0, "cuStreamSynchronize", stream);
        if !d.is_stand_in() {
            says!(d, 0, "cuMemHostUnregister", bytes.as_mut_ptr());
            return;
        }
        d.batch(0, &Lists::new(memory, &bytes, 2, 64), stream);
        d.broken(&["BAT-7"]);
        says!(d, 700, "cuStreamSynchronize", stream);
    }
}

behaviour! {
    /// The copies of a batch have no order, and what comes before one that is refused is queued.
    batches_run_backwards_and_in_part (ready) |d| {
        let (stream, memory, mut bytes) = (d.stream(), d.memory(8192), d.pages(2, 1));
        assert_eq!(d.register(&mut bytes), 0);
        bytes[4096..].fill(2);
        let start = bytes.as_ptr() as usize;
        let lists = Lists(
            vec![memory, memory, memory + (1 << 30)],
            vec![start, start + 4096, start],
            vec![4096, 4096, 16],
        );
        assert_eq!(d.batch(1, &lists, stream), 2, "where it failed");
        let mut back = d.pages(1, 0);
        assert_eq!(d.download(&mut back, memory, stream), 0);
        assert_eq!(call!(d, "cuStreamSynchronize", stream), 0);
        // The first one came last.
        assert!(*back == bytes[..4096]);
        assert_eq!(call!(d, "cuMemHostUnregister", bytes.as_mut_ptr()), 0);
    }
}
