//! Many copies by one call: `cuMemcpyBatchAsync`, in the form of CUDA 12.8, which later drivers have as well.
//!
//! The copies of a batch are queued last first, since no program may rely on their order. Where one of them is refused,
//! those before it are queued all the same: an error says nothing about the others.

use std::sync::Mutex;

use super::calls::call;
use super::world::*;
use crate::common::locked;

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
        let mut all = locked(&UNDER_WAY);
        let is_beside = all.contains(&context);
        all.push(context);
        drop(all);
        // For others that come meanwhile.
        std::thread::yield_now();
        Self { context, is_beside }
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let mut all = locked(&UNDER_WAY);
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

    /// Queues these copies, given by targets, sources and lengths. `fault` is the copy at which it failed.
    fn batch(
        &mut self,
        name: &str,
        [targets, sources]: [&[u64]; 2],
        lengths: &[usize],
        stream: usize,
        fault: &mut usize,
    ) -> Outcome {
        let hosts = |list: &[u64]| list.iter().any(|at| self.is_elsewhere(Place::Host(*at as usize)));
        if hosts(targets) || hosts(sources) {
            let context = self.current(name)?;
            let text = format!("{name} with the host's address of registered memory");
            self.let_pass("BAT-7", text);
            self.kill(context, ILLEGAL_ADDRESS);
            return Ok(());
        }
        let mut copies = Vec::new();
        let refused = (0..lengths.len()).find_map(|at| {
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
        let written = copies.iter().map(|(_, dst, len)| (dst.address(), *len)).collect();
        let read = copies.iter().map(|(src, _, len)| (src.address(), *len));
        if let Some((at, len)) = meeting(written, read) {
            self.let_pass("BAT-4", format!("{name}: {len} bytes at {at:#x} meet what another copy writes"));
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

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyBatchAsync(
    targets: *const u64,
    sources: *const u64,
    lengths: *const usize,
    count: usize,
    attributes: *const Attributes,
    firsts: *const usize,
    sets: usize,
    fault: *mut usize,
    stream: usize,
) -> u32 {
    let name = "cuMemcpyBatchAsync";
    // By convention: the call as a whole failed, none of its copies.
    let (mut at, under_way) = (usize::MAX, UnderWay::begin());
    let code = call(name, of(stream), |w| {
        if under_way.is_beside {
            w.let_pass("BAT-6", format!("{name} beside another one"));
        }
        let is_null = targets.is_null() || sources.is_null() || lengths.is_null();
        if is_null || attributes.is_null() || firsts.is_null() {
            return w.violate("ARG-1", name, INVALID_VALUE);
        }
        w.current(name)?;
        if stream <= 1 {
            return w.violate("BAT-1", format!("{name} on the legacy stream"), INVALID_VALUE);
        }
        if w.stream(name, stream)?.capture.is_some() {
            // It is refused, and the capture goes on (seen on driver 580.159).
            return w.violate("BAT-3", format!("{name} on {stream:#x}"), CAPTURE_UNSUPPORTED);
        }
        // SAFETY: the caller's promise: lists of so many entries.
        let (firsts, orders, addresses, lengths) = unsafe {
            (
                std::slice::from_raw_parts(firsts, sets),
                std::slice::from_raw_parts(attributes, sets),
                [targets, sources].map(|list| std::slice::from_raw_parts(list, count)),
                std::slice::from_raw_parts(lengths, count),
            )
        };
        let ordered = firsts.first() == Some(&0) && firsts.windows(2).all(|w| w[0] < w[1]);
        if count == 0
            || !ordered
            || firsts.last().is_some_and(|last| *last >= count)
            || orders.iter().any(|set| !(1..=3).contains(&set.order) || set.flags > 1)
        {
            let text = format!("{name}: {count} copies, {sets} attributes");
            return w.violate("BAT-5", text, INVALID_VALUE);
        }
        w.batch(name, addresses, lengths, stream, &mut at)
    });
    // SAFETY: null, or valid for a write.
    if let Some(fault) = unsafe { fault.as_mut() }.filter(|_| code != 0) {
        *fault = at;
    }
    code
}
