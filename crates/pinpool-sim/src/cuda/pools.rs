//! Memory in stream order: allocated and freed as operations of a stream, from the device's one pool.
//!
//! An allocation has its address at once, and attributes with it; it may be used once its stream has reached it. After
//! the call that frees it the address is unknown (so it was seen on driver 580: the attributes are cleared when
//! `cuMemFreeAsync` has returned), and the memory is freed when the stream reaches that. Until then an allocation on
//! the same stream may get that very memory, as a driver gives it, under an address of its own.

use std::sync::Arc;

use super::calls::write;
use super::world::*;
use crate::common::entries;

/// The handle of the pool, as attributes show it.
pub const POOL: usize = 0x9001;

entries! {
    cuda;

    fn cuMemAllocAsync(address: *mut u64, len: usize, stream: usize) in of(stream), |w, name| {
        let context = w.current(name)?;
        w.stream(name, stream)?;
        let at = w.allocate(context, len)?;
        w.be(at, Kind::Pool { born: false, dying: false });
        w.inherit(at, stream);
        w.submit(name, stream, Op::Allocate(at))?;
        write(w, name, address, at)
    }

    fn cuMemFreeAsync(address: u64, stream: usize) in of(stream), |w, name| {
        w.stream(name, stream)?;
        match w.blocks.get_mut(&address).map(|b| &mut b.kind) {
            Some(Kind::Pool { dying, .. }) if !*dying => *dying = true,
            // Plain memory may be freed in a stream's order, too.
            Some(kind @ Kind::Plain) => *kind = Kind::Pool { born: true, dying: true },
            _ => {
                return w.violate(
                    "POOL-3",
                    format!("{address:#x} is no allocation in stream order"),
                    INVALID_VALUE,
                );
            }
        }
        w.submit(name, stream, Op::Free(address)).map(drop)
    }
}

impl World {
    /// A new allocation has the memory of one of its length that is to be freed by the same stream, in whose order that
    /// is free by then: a use without that order finds the older one's copies still at work there.
    fn inherit(&mut self, at: u64, stream: usize) {
        let stream = self.resolved(stream);
        let Some(Block { len, .. }) = self.blocks.get(&at) else { return };
        let frees = self.streams.get(&stream).into_iter().flat_map(|s| s.queue.iter().rev());
        let freed =
            frees.filter_map(|op| if let Op::Free(freed) = op { self.blocks.get(freed) } else { None });
        // Another allocation may have it already.
        let unused = |b: &&Block| b.len == *len && Arc::strong_count(&b.bytes) == 1;
        let Some(bytes) = freed.into_iter().find(unused).map(|b| b.bytes.clone()) else { return };
        if let Some(block) = self.blocks.get_mut(&at) {
            block.bytes = bytes;
        }
    }

    /// A stream has reached an allocation.
    pub fn run_allocate(&mut self, at: u64) {
        if let Some(Kind::Pool { born, .. }) = self.blocks.get_mut(&at).map(|b| &mut b.kind) {
            *born = true;
        }
    }

    /// A stream has reached the place where memory is freed. What is ordered before that has run by now.
    pub fn run_free(&mut self, at: u64) {
        let Some(len) = self.blocks.get(&at).map(|b| b.len as u64) else { return };
        if self.run_users(|place, _| matches!(place, Place::Device(p) if (at..at + len).contains(p))) {
            self.let_pass("POOL-4", format!("{at:#x} is used by a copy that is not in order with it"));
        }
        self.blocks.remove(&at);
    }

    /// A copy runs that uses device memory.
    pub fn check_born(&mut self, at: u64, len: usize) {
        let unborn = |b: &Block| matches!(b.kind, Kind::Pool { born: false, .. });
        if self.block(at, len).is_some_and(|(block, _)| unborn(block)) {
            self.let_pass("POOL-1", format!("{at:#x} is used before its allocation's turn has come"));
        }
    }

    /// A copy is submitted that names device memory.
    pub fn check_dying(&mut self, call: &str, at: u64, len: usize) -> Outcome {
        let dying = |b: &Block| matches!(b.kind, Kind::Pool { dying: true, .. });
        if self.block(at, len).is_some_and(|(block, _)| dying(block)) {
            return self.violate("POOL-2", format!("{call}: {at:#x} was freed"), INVALID_VALUE);
        }
        Ok(())
    }
}
