//! Rules of the stand-in about memory of others and memory in stream order.

use std::path::Path;

use crate::standin::probe::{Driver, LIBRARY, PAGE};
use crate::support::kernels::{HEAP, Raw};

/// What `cuPointerGetAttributes` writes: context, type, managed, ordinal, start, size, pool.
#[derive(Debug, Default, PartialEq)]
struct Attributes {
    context: usize,
    kind: u32,
    managed: u32,
    ordinal: i32,
    start: u64,
    size: usize,
    pool: usize,
}

impl Driver {
    fn attributes(&self, address: usize) -> Attributes {
        // The range is left as it was where there is none.
        let mut found = Attributes { start: 7, size: 7, ..Attributes::default() };
        let names = [1, 2, 8, 9, 11, 12, 17];
        let places: [*mut u8; 7] = [
            (&raw mut found.context).cast(),
            (&raw mut found.kind).cast(),
            (&raw mut found.managed).cast(),
            (&raw mut found.ordinal).cast(),
            (&raw mut found.start).cast(),
            (&raw mut found.size).cast(),
            (&raw mut found.pool).cast(),
        ];
        assert_eq!(call!(self, "cuPointerGetAttributes", 7, names.as_ptr(), places.as_ptr(), address), 0);
        found
    }

    fn pooled(&self, len: usize, stream: usize) -> usize {
        made!(self, "cuMemAllocAsync", len, stream)
    }

    /// Memory of the device's heap, on a real driver by a kernel's malloc.
    fn device_malloc(&self, len: usize) -> usize {
        if self.stand_in.has("standin_device_malloc") {
            // SAFETY: `pointers.rs` of the stand-in has the signature, here and below.
            return unsafe {
                self.stand_in.get::<extern "C" fn(usize, usize) -> u64>("standin_device_malloc")(0, len)
                    as usize
            };
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

    fn special(&self, device: usize, kind: u32, len: usize) -> usize {
        // SAFETY: as above.
        unsafe {
            self.stand_in.get::<extern "C" fn(usize, u32, usize) -> u64>("standin_memory")(device, kind, len)
                as usize
        }
    }
}

/// What attributes say where nothing is known.
fn unknown() -> Attributes {
    Attributes { ordinal: -2, start: 7, size: 7, ..Attributes::default() }
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
        if d.stand_in.has("standin_reset") {
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

behaviour! {
    attributes_say_what_an_address_is (ready) |d| {
        let context = made!(d, "cuCtxGetCurrent");
        let (stream, memory, mut host) = (d.stream(), d.memory(1000), vec![0; PAGE]);
        assert_eq!(d.attributes(host.as_ptr() as usize), unknown());
        assert_eq!(d.register(&mut host), 0);
        let start = host.as_ptr() as u64;
        let pinned = Attributes { context, kind: 1, start, size: PAGE, ..Attributes::default() };
        assert_eq!(d.attributes(host.as_ptr() as usize + 9), pinned);
        let plain = Attributes { context, kind: 2, start: memory as u64, size: 1000, ..Attributes::default() };
        assert_eq!(d.attributes(memory + 999), plain);
        assert_eq!(d.attributes(memory + 1000), unknown());
        // Of no context: a pool's, and mapped ranges.
        let pooled = d.pooled(64, stream);
        let found = d.attributes(pooled + 1);
        assert_eq!((found.context, found.kind, found.start, found.size), (0, 2, pooled as u64, 64));
        assert_ne!(found.pool, 0);
        assert_eq!(call!(d, "cuMemFreeAsync", pooled, stream), 0);
        assert_eq!(d.attributes(pooled), unknown(), "from the call on");
        let mapped = d.special(0, 2, 64);
        assert_eq!((d.attributes(mapped).context, d.attributes(mapped).kind), (0, 2));
        assert_eq!(d.attributes(d.special(0, 1, 64)).managed, 1);
        let foreign = d.attributes(d.special(0, 0, 64)).context;
        assert!(foreign != 0 && foreign != context);
        assert_eq!(d.attributes(d.device_malloc(64)), unknown());
        assert_eq!(call!(d, "cuMemFree_v2", memory), 0);
        assert_eq!(d.attributes(memory), unknown());
        d.current(1);
        assert_eq!(d.attributes(d.memory(8)).ordinal, 1);
        d.broken(&[]);
    }

    a_device_says_whether_it_has_pools (ready) |d| {
        let mut value = 0_i32;
        assert_eq!(call!(d, "cuDeviceGetAttribute", &raw mut value, 115, 0), 0);
        assert_eq!(value, 1);
        assert_eq!(call!(d, "cuDeviceGetAttribute", &raw mut value, 115, 7), 101);
        assert_eq!(call!(d, "cuDeviceGetAttribute", &raw mut value, 9999, 0), 1);
    }
}
