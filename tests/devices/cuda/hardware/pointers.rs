//! Addresses that copies cannot use are refused, with words that say what they are.

use pinpool::cuda::{device_heap_limit, set_device_heap_limit};

use super::{Raw, open, pool, raw_memory, round_trip};
use crate::support::kernels::HEAP;

/// Memory from a kernel's own malloc: no copy call accepts it, and drivers only say "invalid value".
pub fn heap(raw: &Raw) {
    const TEST: &str = "memory_of_the_devices_heap_is_refused";
    const LEN: u64 = 4096;
    let device = open(0);
    let before = device_heap_limit(&device).expect("the heap's limit");
    // Before any module that uses the heap is loaded.
    set_device_heap_limit(&device, 32 << 20).expect("nothing uses the heap yet");
    let after = device_heap_limit(&device).expect("the heap's limit");
    assert!(after >= 32 << 20, "{before} before, {after} after 32 MiB were asked for");
    raw.enter(0);
    let heap_alloc = raw.kernel(HEAP, c"heap_alloc");
    let (stream, out) = (raw.stream(), raw.memory(8));
    raw.start(heap_alloc, 1, 1, stream, &[LEN, out as u64]);
    raw.synchronize(stream);
    let mut word = [0; 8];
    raw.fetch(out, &mut word);
    let address = u64::from_le_bytes(word);
    assert_ne!(address, 0, "the kernel's malloc gave nothing");
    let refused = raw_memory(&device, address, LEN as usize);
    let refused = refused.expect_err("no copy accepts memory of the device's heap").to_string();
    println!("{TEST}: {address:#x} from a kernel's malloc: {refused}");
    assert!(refused.contains("heap") || refused.contains("malloc"), "it does not say what it is: {refused}");
    let late = set_device_heap_limit(&device, 64 << 20);
    let late = late.expect_err("a module that uses the heap is loaded").to_string();
    assert!(late.contains("module"), "it does not say why: {late}");
    // Nothing is poisoned by either.
    assert_eq!(device.lost(), None);
    let memory = device.alloc(100_000).expect("device memory");
    round_trip(&pool(&device), &device.stream().expect("a stream"), &memory, 1);
    println!("{TEST}: limit {before}, set to {after}; set again too late: {late}");
}
