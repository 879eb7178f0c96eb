//! Many copies by one call: `cuMemcpyBatchAsync`, in the form of CUDA 12.8, and with the feature `cuda13` also in that
//! of 13.0, which lacks the place where it failed.
//!
//! The copies of a batch are queued last first, since no program may rely on their order. Where one of them is refused,
//! those before it are queued all the same: an error says nothing about the others.

#![allow(non_snake_case)]

use std::ffi::c_void;

use std::sync::{Mutex, PoisonError};

use crate::calls::call;
use crate::world::*;

/// The context of each call for a batch that is under way.
static UNDER_WAY: Mutex<Vec<usize>> = Mutex::new(Vec::new());

/// A call for a batch, from its beginning on.
struct UnderWay {
    context: usize,
    /// Whether another one on this context had not ended.
    is_beside: bool,
}

impl UnderWay {
    fn begin() -> Self {
        let context = STACK.with_borrow(|stack| stack.last().copied()).unwrap_or(0);
        let mut all = UNDER_WAY.lock().unwrap_or_else(PoisonError::into_inner);
        let is_beside = all.contains(&context);
        all.push(context);
        drop(all);
        // For others that come meanwhile.
        std::thread::yield_now();
        Self { context, is_beside }
    }

    fn check(&self, w: &mut World, name: &str) {
        if self.is_beside {
            let _: Outcome = w.violate("BAT-6", format!("{name} beside another one"), 0);
        }
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let mut all = UNDER_WAY.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = all.iter().position(|context| *context == self.context) {
            all.swap_remove(at);
        }
    }
}

/// cuda.h's `CUmemcpyAttributes`: order of access to the source, two locations of two numbers, flags.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Attributes {
    order: u32,
    locations: [i32; 4],
    flags: u32,
}

/// The arguments of both forms.
struct Batch {
    name: &'static str,
    targets: *const u64,
    sources: *const u64,
    lengths: *const usize,
    count: usize,
    attributes: *const Attributes,
    firsts: *const usize,
    sets: usize,
    stream: usize,
}

impl World {
    /// Whether the device has this memory at another address than the host.
    fn is_elsewhere(&self, place: Place) -> bool {
        let Place::Host(at) = place else { return false };
        self.hosts.shift() > 0
            && self.registered.iter().any(|(start, len)| (*start..start + len).contains(&at))
    }

    /// A place by its address: all are one space.
    fn place(&self, address: u64) -> Place {
        let shifted = (address as usize).wrapping_sub(self.hosts.shift());
        if self.is_elsewhere(Place::Host(shifted)) {
            return Place::Host(shifted);
        }
        let device = self.blocks.range(..=address).next_back();
        // Made-up addresses of this device or another begin there.
        let made_up = address >= 0x7f00_0000_0000_0000;
        match device {
            _ if self.hosts.has(address as usize, 1) => Place::Host(address as usize),
            Some((start, block)) if address - start < block.len as u64 => Place::Device(address),
            _ if made_up => Place::Device(address),
            _ => Place::Host(address as usize),
        }
    }

    /// # Safety
    /// The lists are null or have that many entries.
    unsafe fn batch(&mut self, batch: &Batch, fault: &mut usize) -> Outcome {
        let Batch { name, targets, sources, lengths, count, attributes, firsts, sets, stream } = *batch;
        // By convention: the call as a whole failed, none of its copies.
        *fault = usize::MAX;
        let null =
            [targets.cast::<c_void>(), sources.cast(), lengths.cast(), attributes.cast(), firsts.cast()];
        if null.iter().any(|list| list.is_null()) {
            return self.violate("ARG-1", name, INVALID_VALUE);
        }
        self.current(name)?;
        if stream <= 1 {
            return self.violate("BAT-1", format!("{name} on the legacy stream"), INVALID_VALUE);
        }
        if self.stream(name, stream)?.capture.is_some() {
            // It is refused, and the capture goes on (seen on driver 580.159).
            return self.violate("BAT-3", format!("{name} on {stream:#x}"), CAPTURE_UNSUPPORTED);
        }
        // SAFETY: the caller's promise.
        let (firsts, orders) = unsafe {
            (std::slice::from_raw_parts(firsts, sets), std::slice::from_raw_parts(attributes, sets))
        };
        let ordered = firsts.first() == Some(&0) && firsts.windows(2).all(|w| w[0] < w[1]);
        if count == 0
            || !ordered
            || firsts.last().is_some_and(|last| *last >= count)
            || orders.iter().any(|set| !(1..=3).contains(&set.order) || set.flags > 1)
        {
            return self.violate(
                "BAT-5",
                format!("{name}: {count} copies, {sets} attributes"),
                INVALID_VALUE,
            );
        }
        // SAFETY: the caller's promise.
        let (targets, sources, lengths) = unsafe {
            (
                std::slice::from_raw_parts(targets, count),
                std::slice::from_raw_parts(sources, count),
                std::slice::from_raw_parts(lengths, count),
            )
        };
        let hosts = |list: &[u64]| list.iter().any(|at| self.is_elsewhere(Place::Host(*at as usize)));
        if hosts(targets) || hosts(sources) {
            let context = self.current(name)?;
            let text = format!("{name} with the host's address of registered memory");
            let _: Outcome = self.violate("BAT-7", text, 0);
            self.kill(context, ILLEGAL_ADDRESS);
            return Ok(());
        }
        let mut copies = Vec::new();
        let refused = (0..count).find_map(|at| {
            let (src, dst, len) = (self.place(sources[at]), self.place(targets[at]), lengths[at]);
            let checked = if len == 0 {
                self.violate("BAT-2", format!("{name}: copy {at} has no bytes"), INVALID_VALUE)
            } else {
                self.check(name, src, len)
                    .and_then(|()| self.check(name, dst, len))
                    .and_then(|()| self.may_write(name, dst, len))
            };
            match checked {
                Ok(()) => copies.push((src, dst, len)),
                Err(code) => return Some((at, code)),
            }
            None
        });
        let spans = |(a, n): (u64, usize), (b, m): (u64, usize)| a < b + m as u64 && b < a + n as u64;
        for (i, (_, dst, len)) in copies.iter().enumerate() {
            let written = (dst.address(), *len);
            let meets = |(j, (src, other, n)): (usize, &(Place, Place, usize))| {
                (j < i && spans(written, (other.address(), *n)))
                    || (j != i && spans(written, (src.address(), *n)))
            };
            if copies.iter().enumerate().any(meets) {
                let text = format!("{name}: copy {i} writes where another one reads or writes");
                let _: Outcome = self.violate("BAT-4", text, 0);
                break;
            }
        }
        for (src, dst, len) in copies.into_iter().rev() {
            self.submit(name, stream, Op::Copy { src, dst, len })?;
        }
        match refused {
            Some((at, code)) => {
                *fault = at;
                Err(code)
            }
            None => Ok(()),
        }
    }
}

impl Place {
    fn address(&self) -> u64 {
        match *self {
            Place::Host(at) => at as u64,
            Place::Device(at) => at,
        }
    }
}

/// Of CUDA 12.8.
#[cfg(not(any(feature = "cuda11", feature = "cuda12")))]
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyBatchAsync(
    targets: *mut u64,
    sources: *mut u64,
    lengths: *mut usize,
    count: usize,
    attributes: *mut Attributes,
    firsts: *mut usize,
    sets: usize,
    fault: *mut usize,
    stream: *mut c_void,
) -> u32 {
    const NAME: &str = "cuMemcpyBatchAsync";
    let stream = stream as usize;
    let batch = Batch { name: NAME, targets, sources, lengths, count, attributes, firsts, sets, stream };
    let (mut at, under_way) = (usize::MAX, UnderWay::begin());
    let code = call(NAME, |w| {
        under_way.check(w, NAME);
        // SAFETY: the caller's promise.
        unsafe { w.batch(&batch, &mut at) }
    });
    // SAFETY: null, or valid for a write.
    if let Some(fault) = unsafe { fault.as_mut() }.filter(|_| code != 0) {
        *fault = at;
    }
    code
}

/// Of CUDA 13.0.
#[cfg(feature = "cuda13")]
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyBatchAsync_v2(
    targets: *const u64,
    sources: *const u64,
    lengths: *const usize,
    count: usize,
    attributes: *mut Attributes,
    firsts: *mut usize,
    sets: usize,
    stream: *mut c_void,
) -> u32 {
    const NAME: &str = "cuMemcpyBatchAsync_v2";
    let stream = stream as usize;
    let batch = Batch { name: NAME, targets, sources, lengths, count, attributes, firsts, sets, stream };
    let under_way = UnderWay::begin();
    call(NAME, |w| {
        under_way.check(w, NAME);
        // SAFETY: the caller's promise.
        unsafe { w.batch(&batch, &mut 0) }
    })
}
