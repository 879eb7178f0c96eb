//! What an address is: attributes, and memory that attributes know nothing of. And the limit of the heap that kernels
//! allocate from.
//!
//! What is written for an address that the driver knows nothing of was seen on driver 580: success, no context, type 0,
//! ordinal -2, and the range left as it was. For memory of a pool and for mapped ranges there is no context.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{c_int, c_uint, c_void};

use crate::calls::{call, write};
use crate::pools::POOL;
use crate::world::*;

/// The device-side heap's limit unless a program sets it.
const HEAP: usize = 8 << 20;
const MALLOC_HEAP_SIZE: c_int = 2;

#[derive(Default)]
pub struct Pointers {
    /// What kernels allocated: start and length.
    heap: BTreeMap<u64, usize>,
    /// The heap's limit, by context.
    limits: BTreeMap<usize, usize>,
    /// Contexts in which a module that uses the heap was loaded.
    loaded: BTreeSet<usize>,
}

/// What is known of an address.
struct Known {
    context: usize,
    kind: c_uint,
    managed: bool,
    ordinal: c_int,
    range: Option<(u64, usize)>,
    pool: usize,
}

impl World {
    fn known(&mut self, at: u64) -> Known {
        let nothing = Known { context: 0, kind: 0, managed: false, ordinal: -2, range: None, pool: 0 };
        let host = self
            .registered
            .iter()
            .find(|(start, len)| (**start as u64..(**start + **len) as u64).contains(&at));
        if let Some((start, len)) = host {
            let range = Some((*start as u64, *len));
            let context = self.current("cuPointerGetAttributes").unwrap_or(0);
            return Known { context, kind: 1, ordinal: 0, range, ..nothing };
        }
        if let Some((start, len, context, managed)) = self.hosts.around(at as usize) {
            let ordinal = self.contexts.get(&context).map_or(-2, |c| c.device as c_int);
            let (kind, range) = (if managed { 2 } else { 1 }, Some((start as u64, len)));
            return Known { context, kind, managed, ordinal, range, ..nothing };
        }
        let Some((start, block)) = self.blocks.range(..=at).next_back() else { return nothing };
        if at - start >= block.len as u64 {
            return nothing;
        }
        let ordinal = self.contexts.get(&block.context).map_or(-2, |c| c.device as c_int);
        let known = Known { kind: 2, ordinal, range: Some((*start, block.len)), ..nothing };
        match block.kind {
            Kind::Plain => Known { context: block.context, ..known },
            Kind::Managed => Known { context: block.context, managed: true, ..known },
            Kind::Mapped => known,
            Kind::Pool { dying: false, .. } => Known { pool: POOL, ..known },
            Kind::Pool { .. } => Known { kind: 0, ordinal: -2, range: None, ..known },
        }
    }

    /// Whether it is memory of the device-side heap, which copies do not accept.
    pub fn check_heap(&mut self, call: &str, at: u64) -> Outcome {
        let heap = self.pointers.heap.range(..=at).next_back();
        if heap.is_some_and(|(start, len)| at - start < *len as u64) {
            return self.violate(
                "PTR-1",
                format!("{call}: {at:#x} is memory of the device-side heap"),
                INVALID_VALUE,
            );
        }
        Ok(())
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuPointerGetAttributes(
    count: c_uint,
    names: *const c_int,
    places: *const *mut c_void,
    address: u64,
) -> u32 {
    const NAME: &str = "cuPointerGetAttributes";
    call(NAME, |w| {
        w.current(NAME)?;
        if names.is_null() || places.is_null() || count == 0 {
            return w.violate("PTR-2", NAME, INVALID_VALUE);
        }
        let known = w.known(address);
        for i in 0..count as usize {
            // SAFETY: the caller's promise: that many names and places, each place of its name's type.
            unsafe {
                let place = *places.add(i);
                match *names.add(i) {
                    1 => write(w, NAME, place.cast(), known.context)?,
                    2 => write(w, NAME, place.cast(), known.kind)?,
                    8 => write(w, NAME, place.cast(), c_uint::from(known.managed))?,
                    9 => write(w, NAME, place.cast(), known.ordinal)?,
                    11 => known.range.map_or(Ok(()), |r| write(w, NAME, place.cast(), r.0))?,
                    12 => known.range.map_or(Ok(()), |r| write(w, NAME, place.cast(), r.1))?,
                    17 => write(w, NAME, place.cast(), known.pool)?,
                    other => return w.violate("PTR-2", format!("{NAME}: attribute {other}"), INVALID_VALUE),
                }
            }
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetLimit(bytes: *mut usize, limit: c_int) -> u32 {
    const NAME: &str = "cuCtxGetLimit";
    call(NAME, |w| {
        let context = w.current(NAME)?;
        if limit != MALLOC_HEAP_SIZE {
            return Err(UNSUPPORTED_LIMIT);
        }
        let set = w.pointers.limits.get(&context).copied().unwrap_or(HEAP);
        // SAFETY: as in `calls.rs`.
        unsafe { write(w, NAME, bytes, set) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetLimit(limit: c_int, bytes: usize) -> u32 {
    const NAME: &str = "cuCtxSetLimit";
    call(NAME, |w| {
        let context = w.current(NAME)?;
        w.unsafe_call(NAME)?;
        if limit != MALLOC_HEAP_SIZE {
            return Err(UNSUPPORTED_LIMIT);
        }
        if w.pointers.loaded.contains(&context) {
            return w.violate("HEAP-1", "a module that uses the heap is loaded", INVALID_VALUE);
        }
        w.pointers.limits.insert(context, bytes);
        Ok(())
    })
}

/// What a kernel's `malloc` returns, with the module that has it loaded in the device's primary context. 0: there is
/// none.
#[unsafe(no_mangle)]
extern "C" fn standin_device_malloc(device: usize, len: usize) -> u64 {
    let mut guard = world();
    let Some(w) = guard.as_mut() else { return 0 };
    let Some((context, _)) = w.devices.get(device).and_then(|d| d.primary) else { return 0 };
    let at = w.address(len);
    w.pointers.heap.insert(at, len);
    w.pointers.loaded.insert(context);
    at
}

/// Memory of a device that did not come from `cuMemAlloc` in its primary context: of another context (0), managed (1),
/// or mapped by `cuMemMap` (2). Freed by `cuMemFree`. 0: there is none.
#[unsafe(no_mangle)]
extern "C" fn standin_memory(device: usize, kind: u32, len: usize) -> u64 {
    let mut guard = world();
    let Some(w) = guard.as_mut() else { return 0 };
    let Some((primary, _)) = w.devices.get(device).and_then(|d| d.primary) else { return 0 };
    let (context, kind) = match kind {
        0 => (w.other_context(device), Kind::Plain),
        1 => (primary, Kind::Managed),
        _ => (primary, Kind::Mapped),
    };
    let Ok(at) = w.allocate(context, len) else { return 0 };
    w.be(at, kind);
    at
}
