//! Copies and fills: checked against where the memory is, and queued, or made at once.

use std::ffi::{c_int, c_uint};

use super::*;
use crate::common::{At, Outcome, Vendor, call, entries};
use crate::world::{Op, Place, World};

/// What both addresses of an asynchronous copy are a multiple of.
const ALIGNMENT: usize = 64;
const HOST_TO_HOST: c_uint = 0;
/// What the device gets from memory that is not page-locked.
const GARBAGE: u8 = 0xDB;

/// Whether the source is on the host, and the destination; `None`: the library finds out.
fn sides(kind: c_uint) -> Option<[bool; 2]> {
    match kind {
        HOST_TO_HOST => Some([true, true]),
        // Through memory of the library's own, too.
        1 | 5 => Some([true, false]),
        2 => Some([false, true]),
        // Within a device, and between two.
        3 | 6 | 7 => Some([false, false]),
        _ => None,
    }
}

/// A copy's arguments, in the order of the header.
#[derive(Clone, Copy)]
struct Copy {
    dst: usize,
    max: usize,
    src: usize,
    len: usize,
    kind: c_uint,
}

fn is_host(place: Place) -> bool {
    matches!(place, Place::Host(_))
}

impl World {
    /// Where memory is that a call names.
    fn place_of(&mut self, at: usize, len: usize) -> Outcome<Place> {
        if self.is_locked(at, len) {
            return Ok(Place::Host(at));
        }
        let mapped = self.registered.values().any(|r| (r.mapped..r.mapped + r.len).contains(&at));
        self.forbid("CPY-7", PARAM_INVALID, mapped)?;
        if self.block(at, len).is_some() {
            return Ok(Place::Device(at));
        }
        // No program has memory of its own there.
        self.forbid("MEM-6", PARAM_INVALID, at >> 47 != 0)?;
        let in_part = self.is_allocated_in_part(at, len) || self.is_registered_in_part(at, len);
        self.forbid("MEM-5", PARAM_INVALID, in_part)?;
        Ok(Place::Host(at))
    }

    /// Checks how many bytes there are said to be room for.
    fn check_room(&mut self, at: usize, max: usize, len: usize) -> Outcome {
        self.forbid("CPY-8", PARAM_INVALID, len > max)?;
        // Where it is known how many there are.
        let host = self.host(at, 1).map(|(start, host)| start + host.len);
        let registered = self.registration(at, 1).map(|(start, of)| start + of.len);
        let device = self.block(at, 1).map(|(start, block, _)| start + block.bytes.len());
        self.let_pass_if("CPY-9", host.or(registered).or(device).is_some_and(|end| end - at < max));
        Ok(())
    }

    /// What is wrong with a copy, whenever it is made; source and destination. `None`: nothing is to be done.
    fn check_copy(&mut self, c: &Copy) -> Outcome<Option<[Place; 2]>> {
        self.forbid("ARG-1", INVALID_PARAM, c.dst == 0 || c.src == 0)?;
        // Older libraries have four kinds.
        self.forbid("CPY-1", INVALID_PARAM, c.kind > if self.acl.old { 3 } else { 7 })?;
        if c.len == 0 {
            return Ok(None);
        }
        let places = [self.place_of(c.src, c.len)?, self.place_of(c.dst, c.len)?];
        self.check_room(c.dst, c.max, c.len)?;
        let fits = sides(c.kind).is_none_or(|sides| sides == places.map(is_host));
        // Where the program runs on the device, all of it is the device's, whatever the kind says.
        self.forbid("CPY-2", PARAM_INVALID, !fits && !self.acl.on_device)?;
        Ok(Some(places))
    }

    fn copy_queued(&mut self, c: &Copy, stream: usize) -> Outcome {
        self.stream(stream)?;
        let device = self.current_device()?;
        let Some(places) = self.check_copy(c)? else { return Ok(()) };
        let within_host = c.kind == HOST_TO_HOST || places.map(is_host) == [true, true];
        self.forbid("CPY-3", NOT_SUPPORTED, within_host && !self.acl.on_device)?;
        for place in places {
            let at = place.address();
            let on = self.block(at, 1).filter(|_| !is_host(place)).map(|(_, of, _)| of.device);
            self.forbid("CTX-5", PARAM_INVALID, on.is_some_and(|on| on != device))?;
            self.let_pass_if("CPY-5", at % ALIGNMENT != 0);
            self.check_segment(at, c.len);
        }
        let [src, dst] = places;
        let pageable = |place: &Place| is_host(*place) && !self.is_locked(place.address(), c.len);
        let op = match places.iter().any(pageable) {
            false => Op::Copy { src, dst, len: c.len },
            true => {
                self.let_pass("CPY-4");
                Op::Staged { bytes: vec![GARBAGE; c.len], dst }
            }
        };
        self.submit(stream, op).map(drop)
    }

    /// A part of a block of the library's must be followed by what the rule for dividing blocks adds to it: before the
    /// block's end, and before what another copy uses, if copies are of whole segments.
    fn check_segment(&mut self, at: usize, len: usize) {
        let Some((start, end)) = self.host(at, len).map(|(start, host)| (start, start + host.len)) else {
            return;
        };
        let span = |len: usize| len.next_multiple_of(32) + 32;
        self.let_pass_if("SEG-1", at != start && at + span(len) > end);
        let near = |other: Place, n: usize, _| match other {
            Place::Host(other) if other > at => other < at + span(len),
            Place::Host(other) if other < at => at < other + span(n),
            _ => false,
        };
        self.let_pass_if("SEG-2", self.acl.whole_segments && !self.users(near).is_empty());
    }

    /// Nothing queued is to use what is used at once: there is no order between the two.
    fn check_order(&mut self, place: Place, len: usize, written: bool) {
        let meets = |other: Place, n, writes| (written || writes) && other.meets(n, place, len);
        self.let_pass_if("CPY-6", !self.users(meets).is_empty());
    }

    /// # Safety
    /// Host memory that the library knows nothing of is valid for reading, and for writing.
    unsafe fn copy_now(&mut self, c: &Copy) -> Outcome {
        self.current()?;
        let Some([src, dst]) = self.check_copy(c)? else { return Ok(()) };
        self.check_order(src, c.len, false);
        let bytes = match src {
            // SAFETY: the caller's promise.
            Place::Host(at) => unsafe { std::slice::from_raw_parts(at as *const u8, c.len).to_vec() },
            Place::Device(_) => self.bytes(src, c.len),
        };
        // SAFETY: the caller's promise.
        unsafe { self.write_now(dst, &bytes) };
        Ok(())
    }

    /// # Safety
    /// Host memory is valid for writing so many bytes.
    unsafe fn write_now(&mut self, dst: Place, bytes: &[u8]) {
        self.check_order(dst, bytes.len(), true);
        match dst {
            // SAFETY: the caller's promise.
            Place::Host(at) => unsafe {
                (at as *mut u8).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            },
            Place::Device(_) => self.write(dst, bytes),
        }
    }
}

entries! {
    Acl, files, also [aclrtMemcpy];

    fn aclrtMemcpyAsync(
        dst: usize,
        max: usize,
        src: usize,
        len: usize,
        kind: c_uint,
        stream: usize,
    ) in Of(stream), |w| {
        w.copy_queued(&Copy { dst, max, src, len, kind }, stream)
    }

    fn aclrtMemset(at: usize, max: usize, value: c_int, len: usize) in Here, |w| {
        w.current()?;
        if len == 0 {
            return Ok(());
        }
        let place = w.place_of(at, len)?;
        w.check_room(at, max, len)?;
        w.write_now(place, &vec![value as u8; len]);
        Ok(())
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtMemcpy(dst: usize, max: usize, src: usize, len: usize, kind: c_uint) -> u32 {
    // SAFETY: the caller's promise.
    let copy = |w: &mut World| unsafe { w.copy_now(&Copy { dst, max, src, len, kind }) };
    let code = call(Vendor::Acl, "aclrtMemcpy", At::Here, copy);
    if Vendor::Acl.loses(code) {
        Vendor::Acl.world(Vendor::Acl.here()).acl.late.push([(dst, len), (src, len)]);
    }
    code
}
