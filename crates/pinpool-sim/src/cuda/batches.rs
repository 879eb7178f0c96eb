//! Many copies by one call: `cuMemcpyBatchAsync`, in the form of CUDA 12.8, which later drivers have as well.
//!
//! The copies of a batch are queued last first, since no program may rely on their order. Where one of them is refused,
//! those before it are queued all the same: an error says nothing about the others.

use std::sync::Mutex;

use super::*;
use crate::common::{Vendor, entries, locked};
use crate::world::{Op, Place};

/// The context of each call for a batch that is under way.
static UNDER_WAY: Mutex<Vec<usize>> = Mutex::new(Vec::new());

/// cuda.h's `CUmemcpyAttributes`: order of access to the source, two locations of two numbers, flags.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Attributes {
    order: u32,
    locations: [i32; 4],
    flags: u32,
}

/// The first of these ranges that meets what another one writes, where no order is promised.
pub fn is_meeting(mut written: Vec<(usize, usize)>, mut read: impl Iterator<Item = (usize, usize)>) -> bool {
    written.sort_unstable();
    // Apart from each other, those that are written end in the order in which they begin.
    let meets = |(at, len): (usize, usize)| {
        let before = written.partition_point(|(start, _)| *start < at + len);
        before > 0 && written[before - 1].0 + written[before - 1].1 > at
    };
    written.windows(2).any(|two| two[0].0 + two[0].1 > two[1].0) || read.any(meets)
}

impl World {
    /// Whether the device has this memory at another address than the host.
    fn is_elsewhere(&self, at: usize) -> bool {
        self.shift() > 0 && self.registration(at, 1).is_some()
    }

    /// A place by its address: all are one space.
    fn place(&self, address: usize) -> Place {
        let shifted = address.wrapping_sub(self.shift());
        if self.is_elsewhere(shifted) {
            return Place::Host(shifted);
        }
        // Made-up addresses of this device or another begin there.
        let is_device = address >= Vendor::Cuda.base() || self.block(address, 1).is_some();
        if is_device && self.host(address, 1).is_none() {
            Place::Device(address)
        } else {
            Place::Host(address)
        }
    }

    /// Queues these copies, given by targets, sources and lengths. `fault` is the copy at which it failed.
    fn batch(&mut self, of: [&[usize]; 3], stream: usize, fault: &mut usize) -> Outcome {
        let [targets, sources, lengths] = of;
        if targets.iter().chain(sources).any(|at| self.is_elsewhere(*at)) {
            let context = self.current()?;
            self.let_pass("BAT-7");
            self.kill(context, ILLEGAL_ADDRESS);
            return Ok(());
        }
        let (mut copies, mut outcome) = (Vec::new(), Ok(()));
        for (at, len) in lengths.iter().enumerate() {
            let (src, dst) = (self.place(sources[at]), self.place(targets[at]));
            outcome = match len {
                0 => self.broken("BAT-2", INVALID_VALUE),
                len => self.check(src, *len, false).and_then(|()| self.check(dst, *len, true)),
            };
            if outcome.is_err() {
                *fault = at;
                break;
            }
            copies.push((src, dst, *len));
        }
        let written = copies.iter().map(|(_, dst, len)| (dst.address(), *len)).collect();
        let read = copies.iter().map(|(src, _, len)| (src.address(), *len));
        self.let_pass_if("BAT-4", is_meeting(written, read));
        for (src, dst, len) in copies.into_iter().rev() {
            self.submit(stream, Op::Copy { src, dst, len })?;
        }
        outcome
    }
}

/// Makes a call for a batch, which is told whether another one on this context had not ended when it began.
fn under_way(call: impl FnOnce(bool) -> u32) -> u32 {
    let context = Vendor::Cuda.current();
    let mut all = locked(&UNDER_WAY);
    let is_beside = all.contains(&context);
    all.push(context);
    drop(all);
    // For others that come meanwhile.
    std::thread::yield_now();
    let code = call(is_beside);
    let mut all = locked(&UNDER_WAY);
    if let Some(at) = all.iter().position(|of| *of == context) {
        all.swap_remove(at);
    }
    code
}

entries! { Cuda, symbol, also [cuMemcpyBatchAsync]; }

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyBatchAsync(
    targets: *const usize,
    sources: *const usize,
    lengths: *const usize,
    count: usize,
    attributes: *const Attributes,
    firsts: *const usize,
    sets: usize,
    fault: *mut usize,
    stream: usize,
) -> u32 {
    // By convention: the call as a whole failed, none of its copies.
    let mut at = usize::MAX;
    let mut batch = |w: &mut World, is_beside: bool| {
        w.let_pass_if("BAT-6", is_beside);
        let lists = [targets, sources, lengths];
        let no_list = lists.iter().any(|list| list.is_null());
        w.forbid("ARG-1", INVALID_VALUE, no_list || attributes.is_null() || firsts.is_null())?;
        w.current()?;
        w.forbid("BAT-1", INVALID_VALUE, stream <= 1)?;
        if w.stream(stream)?.capture.is_some() {
            // It is refused, and the capture goes on (seen on driver 580.159).
            return w.broken("BAT-3", CAPTURE_UNSUPPORTED);
        }
        // SAFETY: the caller's promise: lists of so many entries.
        let (lists, firsts, orders) = unsafe {
            (
                lists.map(|list| std::slice::from_raw_parts(list, count)),
                std::slice::from_raw_parts(firsts, sets),
                std::slice::from_raw_parts(attributes, sets),
            )
        };
        let ordered = firsts.first() == Some(&0) && firsts.windows(2).all(|w| w[0] < w[1]);
        let unknown = orders.iter().any(|set| !(1..=3).contains(&set.order) || set.flags > 1);
        let within = firsts.last().is_some_and(|last| *last < count);
        w.forbid("BAT-5", INVALID_VALUE, !ordered || !within || unknown)?;
        w.batch(lists, stream, &mut at)
    };
    let code = under_way(|is_beside| {
        crate::common::call(Vendor::Cuda, "cuMemcpyBatchAsync", crate::common::At::Of(stream), |w| {
            batch(w, is_beside)
        })
    });
    // SAFETY: null, or valid for a write.
    if let Some(fault) = unsafe { fault.as_mut() }.filter(|_| code != 0) {
        *fault = at;
    }
    code
}
