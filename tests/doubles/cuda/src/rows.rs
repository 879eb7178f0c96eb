//! Rectangles: `cuMemcpy2DAsync`, rows of one length at even distances on each side.
//!
//! Each row is queued as a copy of its own, the last one first, since no program may rely on their order. A rectangle
//! that reaches beyond one allocation, or one registered range, is refused as a whole, as the driver does it (seen on
//! 580.159); a program that cannot know where ranges end may try, so that is a *note*, ROWS, and no violation.

#![allow(non_snake_case)]

use std::ffi::c_void;

use crate::calls::call;
use crate::world::*;

/// One side, and the whole, of cuda.h's `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Side {
    x: usize,
    y: usize,
    kind: u32,
    host: usize,
    device: u64,
    array: usize,
    pitch: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Rectangle {
    source: Side,
    target: Side,
    width: usize,
    height: usize,
}

/// The most that a pitch may be (`CU_DEVICE_ATTRIBUTE_MAX_PITCH`).
const MAX_PITCH: usize = 0x7fff_ffff;

impl Side {
    fn row(&self, row: usize) -> Option<Place> {
        let offset = (self.y + row) * self.pitch + self.x;
        match self.kind {
            1 => Some(Place::Host(self.host + offset)),
            2 => Some(Place::Device(self.device + offset as u64)),
            _ => None,
        }
    }
}

impl World {
    /// Whether that many bytes are within one range that the driver knows; host memory that it knows nothing of is
    /// within.
    fn in_one(&mut self, place: Place, len: usize) -> bool {
        match place {
            Place::Device(at) => self.block(at, len).is_some(),
            Place::Host(at) => {
                let meets = |(start, bytes): (&usize, &usize)| at < start + bytes && *start < at + len;
                let within = |(start, bytes): (&usize, &usize)| at >= *start && at + len <= start + bytes;
                self.registered.iter().any(within)
                    || self.hosts.has(at, len)
                    || !self.registered.iter().any(meets)
            }
        }
    }

    fn rectangle(&mut self, name: &str, rectangle: &Rectangle, stream: usize) -> Outcome {
        let Rectangle { source, target, width, height } = *rectangle;
        self.current(name)?;
        self.stream(name, stream)?;
        if width == 0 || height == 0 {
            return Ok(());
        }
        let mut sides = Vec::new();
        for side in [&source, &target] {
            let first = side.row(0).filter(|_| side.pitch >= width && side.pitch <= MAX_PITCH);
            let Some(first) = first else {
                let text =
                    format!("{name}: rows of {width} bytes, pitch {}, memory {}", side.pitch, side.kind);
                return self.violate("ROW-1", text, INVALID_VALUE);
            };
            let span = (height - 1) * side.pitch + width;
            if !self.in_one(first, span) {
                self.note("ROWS");
                return Err(INVALID_VALUE);
            }
            self.check(name, first, span)?;
            sides.push((first, span));
        }
        // All rows. The bytes between them are checked, too, which makes no difference: they are of the same range, or
        // of none.
        let (first, span) = sides[1];
        self.may_write(name, first, span)?;
        for row in (0..height).rev() {
            if let (Some(src), Some(dst)) = (source.row(row), target.row(row)) {
                self.submit(name, stream, Op::Copy { src, dst, len: width })?;
            }
        }
        Ok(())
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpy2DAsync_v2(rectangle: *const Rectangle, stream: *mut c_void) -> u32 {
    const NAME: &str = "cuMemcpy2DAsync_v2";
    call(NAME, |w| {
        // SAFETY: null, or valid for a read.
        match unsafe { rectangle.as_ref() } {
            Some(rectangle) => w.rectangle(NAME, rectangle, stream as usize),
            None => w.violate("ARG-1", NAME, INVALID_VALUE),
        }
    })
}
