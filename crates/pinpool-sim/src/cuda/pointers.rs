//! What an address is: attributes, and memory that attributes know nothing of. And the limit of the heap that kernels
//! allocate from.
//!
//! What is written for an address that the driver knows nothing of was seen on driver 580: success, no context, type 0,
//! ordinal -2, and the range left as it was. For memory of a pool and for mapped ranges there is no context.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{c_int, c_uint, c_void};

use super::calls::write;
use super::pools::POOL;
use super::world::*;
use crate::common::entries;

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
            return Known { context, kind: 1, ordinal: self.ordinal(0), range, ..nothing };
        }
        if let Some((start, len, context, managed)) = self.hosts.around(at as usize) {
            let ordinal = self.contexts.get(&context).map_or(-2, |c| self.ordinal(c.device));
            let (kind, range) = (if managed { 2 } else { 1 }, Some((start as u64, len)));
            return Known { context, kind, managed, ordinal, range, ..nothing };
        }
        let Some((start, block)) = self.blocks.range(..=at).next_back() else { return nothing };
        if at - start >= block.len as u64 {
            return nothing;
        }
        let ordinal = self.contexts.get(&block.context).map_or(-2, |c| self.ordinal(c.device));
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
            let text = format!("{call}: {at:#x} is memory of the device-side heap");
            return self.violate("PTR-1", text, INVALID_VALUE);
        }
        Ok(())
    }
}

entries! {
    cuda;

    fn cuPointerGetAttributes(
        count: c_uint,
        names: *const c_int,
        places: *const *mut c_void,
        address: u64,
    ) in here(), |w, name| {
        w.current(name)?;
        if names.is_null() || places.is_null() || count == 0 {
            return w.violate("PTR-2", name, INVALID_VALUE);
        }
        let known = w.known(address);
        for i in 0..count as usize {
            // That many names and places, each place of its name's type.
            let place = *places.add(i);
            match *names.add(i) {
                1 => write(w, name, place.cast(), known.context)?,
                2 => write(w, name, place.cast(), known.kind)?,
                8 => write(w, name, place.cast(), c_uint::from(known.managed))?,
                9 => write(w, name, place.cast(), known.ordinal)?,
                11 => known.range.map_or(Ok(()), |r| write(w, name, place.cast(), r.0))?,
                12 => known.range.map_or(Ok(()), |r| write(w, name, place.cast(), r.1))?,
                17 => write(w, name, place.cast(), known.pool)?,
                other => return w.violate("PTR-2", format!("{name}: attribute {other}"), INVALID_VALUE),
            }
        }
        Ok(())
    }

    fn cuCtxGetLimit(bytes: *mut usize, limit: c_int) in here(), |w, name| {
        let context = w.current(name)?;
        if limit != MALLOC_HEAP_SIZE {
            return Err(UNSUPPORTED_LIMIT);
        }
        let set = w.pointers.limits.get(&context).copied().unwrap_or(HEAP);
        write(w, name, bytes, set)
    }

    fn cuCtxSetLimit(limit: c_int, bytes: usize) in here(), |w, name| {
        let context = w.current(name)?;
        w.unsafe_call(name)?;
        if limit != MALLOC_HEAP_SIZE {
            return Err(UNSUPPORTED_LIMIT);
        }
        if w.pointers.loaded.contains(&context) {
            return w.violate("HEAP-1", "a module that uses the heap is loaded", INVALID_VALUE);
        }
        w.pointers.limits.insert(context, bytes);
        Ok(())
    }
}

impl World {
    /// What a kernel's `malloc` returns, with the module that has it loaded in the device's primary context. 0: there
    /// is none.
    pub fn device_malloc(&mut self, device: usize, len: usize) -> u64 {
        let Some((context, _)) = self.devices.get(device).and_then(|d| d.primary) else { return 0 };
        let at = self.address(len, 0);
        self.pointers.heap.insert(at, len);
        self.pointers.loaded.insert(context);
        at
    }

    /// Memory of a device that did not come from `cuMemAlloc` in its primary context: of another context (0), managed
    /// (1), or mapped by `cuMemMap` (2). Freed by `cuMemFree`. 0: there is none.
    pub fn other_memory(&mut self, device: usize, kind: u32, len: usize) -> u64 {
        let Some((primary, _)) = self.devices.get(device).and_then(|d| d.primary) else { return 0 };
        let (context, kind) = match kind {
            0 => (self.add_context(device), Kind::Plain),
            1 => (primary, Kind::Managed),
            _ => (primary, Kind::Mapped),
        };
        let Ok(at) = self.allocate(context, len) else { return 0 };
        self.be(at, kind);
        at
    }
}
