//! Copies and fills: checked against where the memory is, and queued, or made at once.

#![allow(non_snake_case)]

use std::ffi::{c_int, c_uint, c_void};

use crate::calls::call;
use crate::codes::*;
use crate::shared::with;
use crate::world::*;

/// What both addresses of an asynchronous copy are a multiple of.
const ALIGNMENT: usize = 64;

/// Where memory is that a call names.
#[derive(Clone, Copy, PartialEq)]
enum Where {
    /// Allocated by the library, or registered.
    Locked,
    Pageable,
    /// Of that device.
    Device(usize),
}

/// The last kind: older libraries have four.
const KINDS: c_uint = if cfg!(feature = "acl2022") { 3 } else { 7 };
const HOST_TO_HOST: c_uint = 0;

/// Whether the source is on the host, and the destination; `None`: the library finds out.
fn sides(kind: c_uint) -> Option<(bool, bool)> {
    match kind {
        0 => Some((true, true)),
        // Through memory of the library's own, too.
        1 | 5 => Some((true, false)),
        2 => Some((false, true)),
        // Within a device, and between two.
        3 | 6 | 7 => Some((false, false)),
        _ => None,
    }
}

pub struct Copy {
    pub dst: usize,
    pub max: usize,
    pub src: usize,
    pub len: usize,
    pub kind: c_uint,
}

impl World {
    fn place(&mut self, call: &str, at: usize, len: usize) -> Outcome<Where> {
        if self.hosts.is_locked(at, len) {
            return Ok(Where::Locked);
        }
        if self.hosts.is_mapping(at) {
            let text = format!("{call}: {at:#x} is the device's address of registered memory");
            return self.violate("CPY-7", text, PARAM_INVALID);
        }
        let before = self.blocks.range(..=at).next_back();
        let has = |start: usize, held: usize| at.checked_add(len).is_some_and(|end| end <= start + held);
        if let Some((_, (device, _))) = before.filter(|(start, (_, bytes))| has(**start, bytes.len())) {
            return Ok(Where::Device(*device));
        }
        // No program has memory of its own there.
        if at >> 47 != 0 {
            return self.violate("MEM-1", format!("{call}: {len} bytes at {at:#x}"), PARAM_INVALID);
        }
        if self.hosts.is_locked_in_part(at, len) {
            let text = format!("{call}: {len} bytes at {at:#x} are page-locked in part");
            return self.violate("MEM-3", text, PARAM_INVALID);
        }
        Ok(Where::Pageable)
    }

    /// How many bytes there are from here on, where that is known.
    fn room(&self, at: usize) -> Option<usize> {
        let host = self.hosts.allocation(at, 1).or_else(|| self.hosts.registration(at, 1));
        let device = || self.blocks.range(..=at).next_back().map(|(s, (_, bytes))| (*s, bytes.len()));
        host.or_else(device).map(|(start, len)| (start + len).saturating_sub(at))
    }

    fn set_max(&mut self, call: &str, at: usize, max: usize, len: usize) -> Outcome {
        if len > max {
            return self.violate("MEM-2", format!("{call}: {len} bytes where {max} fit"), PARAM_INVALID);
        }
        if self.room(at).is_some_and(|room| room < max) {
            self.let_pass("MEM-4", format!("{call}: there are fewer than {max} bytes at {at:#x}"));
        }
        Ok(())
    }

    fn as_place(&self, at: usize, of: Where) -> Place {
        if matches!(of, Where::Device(_)) { Place::Device(at) } else { Place::Host(at) }
    }

    /// What is wrong with a copy, whenever it is made. `None`: nothing is to be done.
    fn check(&mut self, call: &str, c: &Copy) -> Outcome<Option<(Where, Where)>> {
        if c.dst == 0 || c.src == 0 {
            return self.violate("ARG-1", call, INVALID_PARAM);
        }
        if c.kind > KINDS {
            return self.violate("CPY-1", format!("{call}: kind {}", c.kind), INVALID_PARAM);
        }
        if c.len == 0 {
            return Ok(None);
        }
        let (src, dst) = (self.place(call, c.src, c.len)?, self.place(call, c.dst, c.len)?);
        self.set_max(call, c.dst, c.max, c.len)?;
        let is_host = |place: Where| !matches!(place, Where::Device(_));
        let fits = sides(c.kind).is_none_or(|sides| sides == (is_host(src), is_host(dst)));
        // Where the program runs on the device, all of it is the device's, whatever the kind says.
        if !fits && !self.on_device {
            let text = format!("{call}: kind {} from {:#x} to {:#x}", c.kind, c.src, c.dst);
            return self.violate("CPY-2", text, PARAM_INVALID);
        }
        Ok(Some((src, dst)))
    }

    pub fn copy_async(&mut self, call: &str, c: &Copy, stream: usize) -> Outcome {
        let stream = self.stream_here(call, stream)?;
        let device = self.current_device(call)?;
        let Some((src, dst)) = self.check(call, c)? else { return Ok(()) };
        let both_host = !matches!(src, Where::Device(_)) && !matches!(dst, Where::Device(_));
        if !self.on_device && (c.kind == HOST_TO_HOST || both_host) {
            return self.violate("CPY-3", format!("{call}: {:#x} to {:#x}", c.src, c.dst), NOT_SUPPORTED);
        }
        for (at, place) in [(c.src, src), (c.dst, dst)] {
            if matches!(place, Where::Device(of) if of != device) {
                let text = format!("{call}: {at:#x} of another device than the stream's");
                return self.violate("CTX-6", text, PARAM_INVALID);
            }
            if !at.is_multiple_of(ALIGNMENT) {
                self.let_pass("CPY-5", format!("{call}: {at:#x}"));
            }
            self.check_segment(call, at, c.len);
        }
        let (from, to) = (self.as_place(c.src, src), self.as_place(c.dst, dst));
        let mut op = Op::Copy { src: from, dst: to, len: c.len };
        if [src, dst].contains(&Where::Pageable) {
            self.let_pass("CPY-4", format!("{call}: {:#x} to {:#x}, {} bytes", c.src, c.dst, c.len));
            op = Op::Garbage { dst: to, len: c.len };
        }
        self.submit(stream, op);
        Ok(())
    }

    /// A part of a block of the library's must be followed by what the rule for dividing blocks adds to it: before the
    /// block's end, and before what another copy uses, if copies are of whole segments.
    fn check_segment(&mut self, call: &str, at: usize, len: usize) {
        let Some((start, whole)) = self.hosts.allocation(at, len) else { return };
        let spans = len.next_multiple_of(32) + 32;
        if at != start && at + spans > start + whole {
            self.let_pass("SEG-1", format!("{call}: {len} bytes at {at:#x} end too near to the block's end"));
        }
        let near = |other: &Place, n: usize| match other {
            Place::Host(other) if *other > at => *other < at + spans,
            Place::Host(other) if *other < at => at < *other + n.next_multiple_of(32) + 32,
            _ => false,
        };
        if self.whole_segments && self.is_used(true, near) {
            self.let_pass("SEG-2", format!("{call}: {len} bytes at {at:#x} are too near to a queued copy's"));
        }
    }

    /// Nothing queued is to use what is used at once: there is no order between the two.
    fn check_order(&mut self, call: &str, place: Place, len: usize, written: bool) {
        let same = |other: &Place, n: usize| match (place, other) {
            (Place::Host(a), Place::Host(b)) | (Place::Device(a), Place::Device(b)) => {
                overlaps(a, len, *b, n)
            }
            _ => false,
        };
        if self.is_used(written, same) {
            self.let_pass("CPY-6", format!("{call}: {place:?} is used by what is queued"));
        }
    }

    fn copy_now(&mut self, call: &str, c: &Copy) -> Outcome {
        self.current(call)?;
        let Some((src, dst)) = self.check(call, c)? else { return Ok(()) };
        let (from, to) = (self.as_place(c.src, src), self.as_place(c.dst, dst));
        self.check_order(call, from, c.len, false);
        self.check_order(call, to, c.len, true);
        let mut bytes = vec![0; c.len];
        // SAFETY: the caller's promise for memory that the library knows nothing of; the rest was looked up.
        unsafe {
            match (from, to) {
                (Place::Host(from), Place::Host(to)) => {
                    std::ptr::copy(from as *const u8, to as *mut u8, c.len);
                }
                (Place::Host(from), _) => {
                    std::ptr::copy_nonoverlapping(from as *const u8, bytes.as_mut_ptr(), c.len);
                    self.write(to, &bytes);
                }
                (Place::Device(at), Place::Host(to)) => {
                    if let Some((block, offset)) = self.block(at, c.len) {
                        bytes.copy_from_slice(&block[offset..offset + c.len]);
                    }
                    std::ptr::copy_nonoverlapping(bytes.as_ptr(), to as *mut u8, c.len);
                }
                _ => self.copy(from, to, c.len),
            }
        }
        Ok(())
    }

    /// Where a fill goes. `None`: nothing is to be done.
    fn check_fill(&mut self, call: &str, at: usize, max: usize, len: usize) -> Outcome<Option<Where>> {
        if at == 0 {
            return self.violate("ARG-1", call, INVALID_PARAM);
        }
        if len == 0 {
            return Ok(None);
        }
        let place = self.place(call, at, len)?;
        self.set_max(call, at, max, len)?;
        Ok(Some(place))
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn aclrtMemcpy(
    dst: *mut c_void,
    max: usize,
    src: *const c_void,
    len: usize,
    kind: c_uint,
) -> u32 {
    const NAME: &str = "aclrtMemcpy";
    let copy = Copy { dst: dst as usize, max, src: src as usize, len, kind };
    let code = call(NAME, |w| w.copy_now(NAME, &copy));
    if is_device_lost(code) {
        with(|w| w.late.push([(copy.dst, len), (copy.src, len)]));
    }
    code
}

#[unsafe(no_mangle)]
extern "C" fn aclrtMemcpyAsync(
    dst: *mut c_void,
    max: usize,
    src: *const c_void,
    len: usize,
    kind: c_uint,
    stream: *mut c_void,
) -> u32 {
    const NAME: &str = "aclrtMemcpyAsync";
    let copy = Copy { dst: dst as usize, max, src: src as usize, len, kind };
    call(NAME, |w| w.copy_async(NAME, &copy, stream as usize))
}

/// Checks whether host memory is page-locked: if not, all that is queued and the copy are done when the call returns.
#[cfg(not(feature = "acl2022"))]
#[unsafe(no_mangle)]
unsafe extern "C" fn aclrtMemcpyAsyncWithCondition(
    dst: *mut c_void,
    max: usize,
    src: *const c_void,
    len: usize,
    kind: c_uint,
    stream: *mut c_void,
) -> u32 {
    const NAME: &str = "aclrtMemcpyAsyncWithCondition";
    let copy = Copy { dst: dst as usize, max, src: src as usize, len, kind };
    call(NAME, |w| {
        let stream = w.stream_here(NAME, stream as usize)?;
        let Some((src, dst)) = w.check(NAME, &copy)? else { return Ok(()) };
        if [src, dst].contains(&Where::Pageable) {
            w.drain(stream);
            return w.copy_now(NAME, &copy);
        }
        w.copy_async(NAME, &copy, stream)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn aclrtMemset(at: *mut c_void, max: usize, value: c_int, len: usize) -> u32 {
    const NAME: &str = "aclrtMemset";
    call(NAME, |w| {
        w.current(NAME)?;
        let at = at as usize;
        let Some(place) = w.check_fill(NAME, at, max, len)? else { return Ok(()) };
        let to = w.as_place(at, place);
        w.check_order(NAME, to, len, true);
        match to {
            // SAFETY: the caller's promise for memory that the library knows nothing of.
            Place::Host(at) => unsafe { (at as *mut u8).write_bytes(value as u8, len) },
            Place::Device(_) => w.write(to, &vec![value as u8; len]),
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn aclrtMemsetAsync(
    at: *mut c_void,
    max: usize,
    value: c_int,
    len: usize,
    stream: *mut c_void,
) -> u32 {
    const NAME: &str = "aclrtMemsetAsync";
    call(NAME, |w| {
        let stream = w.stream_here(NAME, stream as usize)?;
        let at = at as usize;
        let Some(place) = w.check_fill(NAME, at, max, len)? else { return Ok(()) };
        let dst = w.as_place(at, place);
        if place == Where::Pageable {
            w.let_pass("CPY-4", format!("{NAME}: {at:#x}, {len} bytes"));
        }
        w.submit(stream, Op::Set { dst, value: value as u8, len });
        Ok(())
    })
}
