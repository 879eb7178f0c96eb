//! What an address is: attributes, and memory that attributes know nothing of. And the limit of the heap that kernels
//! allocate from.
//!
//! What is written for an address that the driver knows nothing of was seen on driver 580: success, no context, type 0,
//! ordinal -2, and the range left as it was. For memory of a pool and for mapped ranges there is no context.

use std::collections::BTreeSet;
use std::ffi::{c_int, c_uint, c_void};

use super::*;
use crate::common::{Vendor, entries, fails_if};
use crate::world::Kind;

/// The handle of the pool of memory in stream order, as attributes show it.
const POOL: usize = 0x9001;
/// The device-side heap's limit unless a program sets it.
const HEAP: usize = 8 << 20;
const MALLOC_HEAP_SIZE: c_int = 2;

#[derive(Default)]
pub struct Pointers {
    /// What kernels allocated: start and length.
    heap: BTreeMap<usize, usize>,
    /// The heap's limit, by context.
    limits: BTreeMap<usize, usize>,
    /// Contexts in which a module that uses the heap was loaded.
    loaded: BTreeSet<usize>,
}

#[derive(Default)]
struct Known {
    context: usize,
    kind: c_uint,
    managed: bool,
    /// The device, and the allocation; unless nothing is known.
    ordinal: Option<c_int>,
    range: Option<(usize, usize)>,
    pool: usize,
}

impl World {
    fn known(&self, at: usize) -> Known {
        if let Some((start, of)) = self.registration(at, 1) {
            let (context, range) = (Vendor::Cuda.current(), Some((start, of.len)));
            return Known { context, kind: 1, ordinal: Some(self.ordinal(0)), range, ..Known::default() };
        }
        if let Some((start, host)) = self.host(at, 1) {
            let (kind, range) = (if host.managed { 2 } else { 1 }, Some((start, host.len)));
            let (context, ordinal) = (host.context, Some(self.ordinal(host.device)));
            return Known { context, kind, managed: host.managed, ordinal, range, pool: 0 };
        }
        let Some((start, block, _)) = self.block(at, 1).filter(|(_, block, _)| block.kind != Kind::Dying)
        else {
            return Known::default();
        };
        Known {
            context: if matches!(block.kind, Kind::Plain | Kind::Managed) { block.context } else { 0 },
            kind: 2,
            managed: block.kind == Kind::Managed,
            ordinal: Some(self.ordinal(block.device)),
            range: Some((start, block.bytes.len())),
            pool: if matches!(block.kind, Kind::Pool { .. }) { POOL } else { 0 },
        }
    }

    /// Whether it is memory of the device-side heap, which copies do not accept.
    pub(super) fn check_heap(&mut self, at: usize) -> Outcome {
        let heap = self.cuda.pointers.heap.range(..=at).next_back();
        self.forbid("PTR-1", INVALID_VALUE, heap.is_some_and(|(start, len)| at - start < *len))
    }

    /// What a kernel's `malloc` returns, with the module that has it loaded in the device's primary context. 0: there
    /// is none.
    pub(crate) fn device_malloc(&mut self, device: usize, len: usize) -> usize {
        let Some(context) = self.devices[device].primary else { return 0 };
        let at = self.made_up(len, 0);
        self.cuda.pointers.heap.insert(at, len);
        self.cuda.pointers.loaded.insert(context);
        at
    }

    /// Memory of a device that did not come from `cuMemAlloc` in its primary context: of another context (0), managed
    /// (1), or mapped by `cuMemMap` (2). Freed by `cuMemFree`. 0: there is none.
    pub(crate) fn other_memory(&mut self, device: usize, kind: usize, len: usize) -> usize {
        let Some(primary) = self.devices[device].primary else { return 0 };
        let context = if kind == 0 { self.add_context(device) } else { primary };
        let at = self.allocate_in(context, len).unwrap_or(0);
        self.be(at, [Kind::Plain, Kind::Managed, Kind::Mapped][kind]);
        at
    }
}

entries! {
    Cuda, symbol, also [];

    fn cuPointerGetAttributes(
        count: c_uint,
        names: *const c_int,
        places: *const *mut c_void,
        address: usize,
    ) in Here, |w| {
        w.current()?;
        w.forbid("PTR-2", INVALID_VALUE, names.is_null() || places.is_null() || count == 0)?;
        let known = w.known(address);
        for i in 0..count as usize {
            // That many names and places, each place of its name's type.
            let place = *places.add(i);
            match *names.add(i) {
                1 => w.give(place.cast(), known.context)?,
                2 => w.give(place.cast(), known.kind)?,
                8 => w.give(place.cast(), c_uint::from(known.managed))?,
                9 => w.give(place.cast(), known.ordinal.unwrap_or(-2))?,
                11 => known.range.map_or(Ok(()), |range| w.give(place.cast(), range.0))?,
                12 => known.range.map_or(Ok(()), |range| w.give(place.cast(), range.1))?,
                17 => w.give(place.cast(), known.pool)?,
                _ => return w.broken("PTR-2", INVALID_VALUE),
            }
        }
        Ok(())
    }

    fn cuCtxGetLimit(bytes: *mut usize, limit: c_int) in Here, |w| {
        let context = w.current()?;
        fails_if(UNSUPPORTED_LIMIT, limit != MALLOC_HEAP_SIZE)?;
        let set = w.cuda.pointers.limits.get(&context).copied().unwrap_or(HEAP);
        w.give(bytes, set)
    }

    fn cuCtxSetLimit(limit: c_int, bytes: usize) in Here, |w| {
        let context = w.free_context()?;
        fails_if(UNSUPPORTED_LIMIT, limit != MALLOC_HEAP_SIZE)?;
        w.forbid("HEAP-1", INVALID_VALUE, w.cuda.pointers.loaded.contains(&context))?;
        w.cuda.pointers.limits.insert(context, bytes);
        Ok(())
    }
}
