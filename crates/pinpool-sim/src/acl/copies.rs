//! Copies and fills: checked against where the memory is, and queued, or made at once.

use std::ffi::{c_int, c_uint};

use super::calls::{call, there};
use super::codes::*;
use super::world::*;
use crate::common::entries;

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
    fn place(&mut self, at: usize, len: usize) -> Outcome<Where> {
        if self.hosts.is_locked(at, len) {
            return Ok(Where::Locked);
        }
        if self.hosts.is_mapping(at) {
            let text = format!("{at:#x} is the device's address of registered memory");
            return self.violate("CPY-7", text, PARAM_INVALID);
        }
        let before = self.blocks.range(..=at).next_back();
        let has = |start: usize, held: usize| at.checked_add(len).is_some_and(|end| end <= start + held);
        if let Some((_, (device, _))) = before.filter(|(start, (_, bytes))| has(**start, bytes.len())) {
            return Ok(Where::Device(*device));
        }
        // No program has memory of its own there.
        if at >> 47 != 0 {
            return self.violate("MEM-1", format!("{len} bytes at {at:#x}"), PARAM_INVALID);
        }
        if self.hosts.is_locked_in_part(at, len) {
            let text = format!("{len} bytes at {at:#x} are page-locked in part");
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

    fn set_max(&mut self, at: usize, max: usize, len: usize) -> Outcome {
        if len > max {
            return self.violate("MEM-2", format!("{len} bytes where {max} fit"), PARAM_INVALID);
        }
        if self.room(at).is_some_and(|room| room < max) {
            self.let_pass("MEM-4", format!("there are fewer than {max} bytes at {at:#x}"));
        }
        Ok(())
    }

    fn as_place(&self, at: usize, of: Where) -> Place {
        if matches!(of, Where::Device(_)) { Place::Device(at) } else { Place::Host(at) }
    }

    /// What is wrong with a copy, whenever it is made. `None`: nothing is to be done.
    fn check(&mut self, c: &Copy) -> Outcome<Option<(Where, Where)>> {
        if c.dst == 0 || c.src == 0 {
            return self.violate("ARG-1", "null", INVALID_PARAM);
        }
        // Older libraries have four kinds.
        if c.kind > if self.is_old() { 3 } else { 7 } {
            return self.violate("CPY-1", format!("kind {}", c.kind), INVALID_PARAM);
        }
        if c.len == 0 {
            return Ok(None);
        }
        let (src, dst) = (self.place(c.src, c.len)?, self.place(c.dst, c.len)?);
        self.set_max(c.dst, c.max, c.len)?;
        let is_host = |place: Where| !matches!(place, Where::Device(_));
        let fits = sides(c.kind).is_none_or(|sides| sides == (is_host(src), is_host(dst)));
        // Where the program runs on the device, all of it is the device's, whatever the kind says.
        if !fits && !self.on_device {
            let text = format!("kind {} from {:#x} to {:#x}", c.kind, c.src, c.dst);
            return self.violate("CPY-2", text, PARAM_INVALID);
        }
        Ok(Some((src, dst)))
    }

    pub fn copy_async(&mut self, c: &Copy, stream: usize) -> Outcome {
        let stream = self.stream_here(stream)?;
        let device = self.current_device()?;
        let Some((src, dst)) = self.check(c)? else { return Ok(()) };
        let both_host = !matches!(src, Where::Device(_)) && !matches!(dst, Where::Device(_));
        if !self.on_device && (c.kind == HOST_TO_HOST || both_host) {
            return self.violate("CPY-3", format!("{:#x} to {:#x}", c.src, c.dst), NOT_SUPPORTED);
        }
        for (at, place) in [(c.src, src), (c.dst, dst)] {
            if matches!(place, Where::Device(of) if of != device) {
                let text = format!("{at:#x} of another device than the stream's");
                return self.violate("CTX-6", text, PARAM_INVALID);
            }
            if at % ALIGNMENT != 0 {
                self.let_pass("CPY-5", format!("{at:#x}"));
            }
            self.check_segment(at, c.len);
        }
        let (from, to) = (self.as_place(c.src, src), self.as_place(c.dst, dst));
        let mut op = Op::Copy { src: from, dst: to, len: c.len };
        if [src, dst].contains(&Where::Pageable) {
            self.let_pass("CPY-4", format!("{:#x} to {:#x}, {} bytes", c.src, c.dst, c.len));
            op = Op::Garbage { dst: to, len: c.len };
        }
        self.submit(stream, op);
        Ok(())
    }

    /// A part of a block of the library's must be followed by what the rule for dividing blocks adds to it: before the
    /// block's end, and before what another copy uses, if copies are of whole segments.
    fn check_segment(&mut self, at: usize, len: usize) {
        let Some((start, whole)) = self.hosts.allocation(at, len) else { return };
        let spans = len.next_multiple_of(32) + 32;
        if at != start && at + spans > start + whole {
            self.let_pass("SEG-1", format!("{len} bytes at {at:#x} end too near to the block's end"));
        }
        let near = |other: &Place, n: usize| match other {
            Place::Host(other) if *other > at => *other < at + spans,
            Place::Host(other) if *other < at => at < *other + n.next_multiple_of(32) + 32,
            _ => false,
        };
        if self.whole_segments && self.is_used(true, near) {
            self.let_pass("SEG-2", format!("{len} bytes at {at:#x} are too near to a queued copy's"));
        }
    }

    /// Nothing queued is to use what is used at once: there is no order between the two.
    fn check_order(&mut self, place: Place, len: usize, written: bool) {
        let same = |other: &Place, n: usize| match (place, other) {
            (Place::Host(a), Place::Host(b)) | (Place::Device(a), Place::Device(b)) => {
                overlaps(a, len, *b, n)
            }
            _ => false,
        };
        if self.is_used(written, same) {
            self.let_pass("CPY-6", format!("{place:?} is used by what is queued"));
        }
    }

    fn copy_now(&mut self, c: &Copy) -> Outcome {
        self.current()?;
        let Some((src, dst)) = self.check(c)? else { return Ok(()) };
        let (from, to) = (self.as_place(c.src, src), self.as_place(c.dst, dst));
        self.check_order(from, c.len, false);
        self.check_order(to, c.len, true);
        // SAFETY: the caller's promise for memory that the library knows nothing of; the rest was looked up.
        unsafe {
            let bytes = self.read_now(from, c.len);
            self.write_now(to, &bytes);
        }
        Ok(())
    }

    /// What is there, in any memory.
    ///
    /// # Safety
    /// Host memory is valid for reading so many bytes.
    unsafe fn read_now(&mut self, from: Place, len: usize) -> Vec<u8> {
        match from {
            // SAFETY: the caller's promise.
            Place::Host(at) => unsafe { std::slice::from_raw_parts(at as *const u8, len).to_vec() },
            Place::Device(_) => self.bytes(from, len),
        }
    }

    /// # Safety
    /// Host memory is valid for writing so many bytes.
    unsafe fn write_now(&mut self, to: Place, bytes: &[u8]) {
        match to {
            // SAFETY: the caller's promise.
            Place::Host(at) => unsafe {
                (at as *mut u8).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len())
            },
            Place::Device(_) => self.write(to, bytes),
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtMemcpy(dst: usize, max: usize, src: usize, len: usize, kind: c_uint) -> u32 {
    let copy = Copy { dst, max, src, len, kind };
    let code = call("aclrtMemcpy", here(), |w| w.copy_now(&copy));
    if is_device_lost(code) {
        world(here()).late.push([(copy.dst, len), (copy.src, len)]);
    }
    code
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtMemcpyAsync(
    dst: usize,
    max: usize,
    src: usize,
    len: usize,
    kind: c_uint,
    stream: usize,
) -> u32 {
    let copy = Copy { dst, max, src, len, kind };
    call("aclrtMemcpyAsync", of(stream), |w| w.copy_async(&copy, stream))
}

entries! {
    acl;

    fn aclrtMemset(at: usize, max: usize, value: c_int, len: usize) in here(), |w, name| {
        w.current()?;
        there(w, at)?;
        if len == 0 {
            return Ok(());
        }
        let place = w.place(at, len)?;
        w.set_max(at, max, len)?;
        let to = w.as_place(at, place);
        w.check_order(to, len, true);
        // SAFETY: the caller's promise for memory that the library knows nothing of.
        unsafe { w.write_now(to, &vec![value as u8; len]) };
        Ok(())
    }
}
