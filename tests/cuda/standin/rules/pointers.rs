//! Rules of the stand-in about memory of others and memory in stream order.

use std::path::Path;

use crate::standin::probe::{Driver, LIBRARY};
use crate::support::kernels::{HEAP, Raw};

impl Driver {
    fn pooled(&self, len: usize, stream: usize) -> usize {
        made!(self, "cuMemAllocAsync", len, stream)
    }

    /// Memory of the device's heap, on a real driver by a kernel's malloc.
    fn device_malloc(&self, len: usize) -> usize {
        if self.stand_in.has("sim_cuda") || self.is_stand_in() {
            return self.stand_in.command(&format!("malloc 0 {len}")).parse().unwrap();
        }
        let raw = Raw::new(Path::new(&std::env::var_os(LIBRARY).expect("it is being tried")));
        let kernel = raw.kernel(raw.module(HEAP), c"heap_alloc");
        let (stream, out, mut word) = (raw.stream(), raw.alloc(8), [0; 8]);
        raw.launch(kernel, 1, 1, stream, &[len as u64, out]);
        raw.synchronize(stream);
        raw.read(out, &mut word);
        assert_ne!(word, [0; 8], "the kernel's malloc gave nothing");
        usize::from_le_bytes(word)
    }
}

rules! {
    POINTERS:

    ptr_1_the_device_heap_is_not_copied (ready) |d| {
        let (stream, bytes, mut back) = (d.stream(), [1; 64], [0; 64]);
        let heap = d.device_malloc(64);
        d.uploads(1, heap, &bytes, stream);
        d.downloads(1, &mut back[..1], heap + 63, stream);
        d.broken(&["PTR-1", "PTR-1"]);
    }

    ptr_2_attributes_need_names_and_places (ready) |d| {
        let (names, mut value) = ([99], 0_usize);
        let place = [&raw mut value];
        says!(d, 1, "cuPointerGetAttributes", 1, names.as_ptr(), place.as_ptr(), 64);
        says!(d, 1, "cuPointerGetAttributes", 1, 0, place.as_ptr(), 64);
        d.broken(&["PTR-2", "PTR-2"]);
    }

    heap_1_the_heaps_limit_comes_first (ready) |d| {
        assert_eq!(made!(d, "cuCtxGetLimit", 2), 8 << 20);
        says!(d, 0, "cuCtxSetLimit", 2, 64 << 20);
        assert_eq!(made!(d, "cuCtxGetLimit", 2), 64 << 20);
        d.device_malloc(64);
        says!(d, 1, "cuCtxSetLimit", 2, 16 << 20);
        assert_eq!(made!(d, "cuCtxGetLimit", 2), 64 << 20);
        d.broken(&["HEAP-1"]);
        // Another device has a heap of its own.
        if !d.has_devices(2) {
            return;
        }
        d.current(1);
        says!(d, 0, "cuCtxSetLimit", 2, 16 << 20);
    }

    pool_1_memory_begins_in_its_streams_order (ready) |d| {
        let (home, other, event, bytes) = (d.stream(), d.stream(), d.event(), [1; 64]);
        // Complete behind an event of its stream.
        let memory = d.pooled(64, home);
        says!(d, 0, "cuEventRecord", event, home);
        says!(d, 0, "cuStreamWaitEvent", other, event, 0);
        d.uploads(0, memory, &bytes, other);
        says!(d, 0, "cuStreamSynchronize", other);
        d.broken(&[]);
        let memory = d.pooled(64, home);
        d.uploads(0, memory, &bytes, other);
        says!(d, 0, "cuStreamSynchronize", other);
        d.broken(&["POOL-1"]);
        // It may be memory that its stream is still to free, which older work writes.
        let (old, mut read) = (d.pooled(64, home), [0; 64]);
        d.uploads(0, old, &[7; 64], home);
        says!(d, 0, "cuMemFreeAsync", old, home);
        let memory = d.pooled(64, home);
        d.uploads(0, memory, &bytes, other);
        says!(d, 0, "cuStreamSynchronize", other);
        d.broken(&["POOL-1", "POOL-1"]);
        d.downloads(0, &mut read, memory, home);
        says!(d, 0, "cuStreamSynchronize", home);
        if d.is_stand_in() {
            assert_eq!(read, [7; 64], "what was written too early is gone");
        }
    }

    pool_2_memory_ends_with_the_call_that_frees_it (ready) |d| {
        let (stream, bytes) = (d.stream(), [1; 64]);
        let memory = d.pooled(64, stream);
        says!(d, 0, "cuMemFreeAsync", memory, stream);
        d.uploads(1, memory, &bytes, stream);
        d.broken(&["POOL-2"]);
    }

    pool_3_only_what_was_allocated_so_is_freed_so (ready) |d| {
        let (stream, plain) = (d.stream(), d.memory(64));
        let memory = d.pooled(64, stream);
        says!(d, 1, "cuMemFreeAsync", memory + 1, stream);
        // Plain memory, too. (Once: a second time the driver says 0 and never comes back.)
        says!(d, 0, "cuMemFreeAsync", plain, stream);
        says!(d, 0, "cuMemFreeAsync", memory, stream);
        says!(d, 1, "cuMemFreeAsync", memory, stream);
        d.broken(&["POOL-3"; 2]);
        // It is freed when the stream reaches that.
        let leaks = |all: &[&str]| assert!(!d.is_stand_in() || d.stand_in.report().leaks == all);
        leaks(&["contexts 1", "streams 1", "allocations 2"]);
        says!(d, 0, "cuStreamSynchronize", stream);
        leaks(&["contexts 1", "streams 1"]);
    }

    pool_4_memory_freed_under_another_streams_copy (ready) |d| {
        let (home, other, bytes) = (d.stream(), d.stream(), [1; 64]);
        let memory = d.pooled(64, home);
        says!(d, 0, "cuStreamSynchronize", home);
        d.uploads(0, memory, &bytes, other);
        says!(d, 0, "cuMemFreeAsync", memory, home);
        says!(d, 0, "cuStreamSynchronize", home);
        d.broken(&["POOL-4"]);
    }

    pool_5_memory_is_freed_plainly_once_it_is_there (ready) |d| {
        let stream = d.stream();
        let memory = d.pooled(64, stream);
        says!(d, 0, "cuStreamSynchronize", stream);
        says!(d, 0, "cuMemFree_v2", memory);
        d.broken(&[]);
        let memory = d.pooled(64, stream);
        says!(d, 0, "cuMemFree_v2", memory);
        says!(d, 0, "cuStreamSynchronize", stream);
        d.broken(&["POOL-5"]);
    }
}
