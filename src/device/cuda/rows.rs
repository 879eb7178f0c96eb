//! Copies at even distances by one call: `cuMemcpy2DAsync`.
//!
//! Copies of one length at even distances on both sides are the rows of a rectangle. The blocks of one layer of a
//! key-value cache lie like that, for example. The device copies the rows of a rectangle at the link's full speed, and
//! they cost the submitting thread next to nothing: a batch of separate pieces of 4 KiB reaches a fifth of the link's
//! speed, and of 16 KiB three quarters; rectangles of thousands of rows reach 0.96 and 0.99 (H200, driver 580; the
//! bench `queue`, rows `regular`). A call takes 2.5 us and some 0.1 us a row, so a few rows are faster in a batch.
//!
//! The driver wants each side within one allocation, or one registered range. It answers `CUDA_ERROR_INVALID_VALUE`,
//! before it has copied anything (seen on driver 580), where a rectangle reaches across two of them, or outside of any.
//! The crate does not know their bounds here, so it tries the call, and submits what is refused as a batch. A pitch
//! that is too long for the device (`CU_DEVICE_ATTRIBUTE_MAX_PITCH`) is refused in the same way.

#![allow(unsafe_code)]

use std::ffi::c_uint;
use std::ops::Range;
use std::ptr::null_mut;

use super::api::{CUDA_MEMCPY2D, Side2D};
use super::{Cuda, stream};
use crate::device::{StreamHandle, Transfer};
use crate::error::Result;

/// The fewest rows for which a rectangle is faster than a batch: on an H200, 16 rows of 16 KiB take 7 us in either way;
/// 64 rows take 22 us as a rectangle, and 27 to 38 us in a batch.
const FEWEST_ROWS: usize = 32;

/// `CU_MEMORYTYPE_HOST` and `CU_MEMORYTYPE_DEVICE`.
const MEMORY_HOST: c_uint = 1;
const MEMORY_DEVICE: c_uint = 2;

/// The number of copies from the front that are rows of one rectangle: at least 1, or 0 for an empty list.
fn rows(transfers: &[Transfer]) -> usize {
    let mut neighbours = transfers.windows(2).map(|pair| pair[0].distance(&pair[1]));
    match neighbours.next() {
        Some(Some(first)) => 2 + neighbours.take_while(|distance| *distance == Some(first)).count(),
        _ => transfers.len().min(1),
    }
}

/// The next part of a list, from `from` on: a rectangle with enough rows (`true`), or all copies before the next such
/// rectangle (`false`).
pub(super) fn part(transfers: &[Transfer], from: usize) -> (Range<usize>, bool) {
    let mut at = from;
    while at < transfers.len() {
        let many = rows(&transfers[at..]);
        if many >= FEWEST_ROWS {
            return if at == from { (at..at + many, true) } else { (from..at, false) };
        }
        // The last row may be the first of the next rectangle.
        at += (many - 1).max(1);
    }
    (from..transfers.len(), false)
}

fn side(kind: c_uint, at: u64, pitch: u64) -> Side2D {
    let host =
        if kind == MEMORY_HOST { std::ptr::with_exposed_provenance_mut(at as usize) } else { null_mut() };
    let device = if kind == MEMORY_DEVICE { at } else { 0 };
    Side2D { x: 0, y: 0, kind, host, device, array: null_mut(), pitch: pitch as usize }
}

impl Cuda {
    /// Submits copies that [`part`] found to be rows. `None`: this driver has no such call.
    ///
    /// # Safety
    /// As for [`Driver::copy_many`](crate::device::Driver::copy_many).
    pub(super) unsafe fn try_rows(&self, handle: StreamHandle, transfers: &[Transfer]) -> Option<Result<()>> {
        let call = self.api.copy_rows?;
        let [first, second, ..] = transfers else { return None };
        let (host, device) = first.distance(second)?;
        let (source, target) = match *first {
            Transfer::Upload { src, dst, .. } => {
                (side(MEMORY_HOST, src.expose_provenance() as u64, host), side(MEMORY_DEVICE, dst.0, device))
            }
            Transfer::Download { src, dst, .. } => {
                (side(MEMORY_DEVICE, src.0, device), side(MEMORY_HOST, dst.expose_provenance() as u64, host))
            }
            _ => return None,
        };
        let rectangle = CUDA_MEMCPY2D { source, target, width: first.len(), height: transfers.len() };
        let _current = match self.current() {
            Ok(current) => current,
            Err(error) => return Some(Err(error)),
        };
        // SAFETY: the caller promises each row, and no byte between the rows is touched; the description is read before
        // the call returns.
        let code = unsafe { call.call(&raw const rectangle, stream(handle)) };
        Some(self.said("cuMemcpy2DAsync", code))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::DevicePtr;

    fn up(host: usize, device: u64, len: usize) -> Transfer {
        Transfer::Upload { src: std::ptr::without_provenance(host), dst: DevicePtr(device), len }
    }

    fn parts(transfers: &[Transfer]) -> Vec<(Range<usize>, bool)> {
        let mut parts = Vec::new();
        let mut from = 0;
        while from < transfers.len() {
            let part = part(transfers, from);
            from = part.0.end;
            parts.push(part);
        }
        parts
    }

    #[test]
    fn rectangles_are_found_between_other_copies() {
        let rows = |n: usize, at: usize| (0..n).map(move |i| up(at + i * 100, 7000 + 64 * i as u64, 64));
        let all: Vec<Transfer> = rows(FEWEST_ROWS, 1000).collect();
        assert_eq!(parts(&all), [(0..FEWEST_ROWS, true)]);
        assert_eq!(parts(&all[..FEWEST_ROWS - 1]), [(0..FEWEST_ROWS - 1, false)]);
        // Other copies before and after; the second rectangle begins anywhere.
        let mut all = vec![up(5, 5, 5), up(9, 1000, 5)];
        all.extend(rows(FEWEST_ROWS + 3, 1000));
        all.extend(rows(FEWEST_ROWS, 400_000));
        all.push(up(1, 1, 64));
        let first = 2 + FEWEST_ROWS + 3;
        assert_eq!(
            parts(&all),
            [
                (0..2, false),
                (2..first, true),
                (first..first + FEWEST_ROWS, true),
                (first + FEWEST_ROWS..all.len(), false)
            ]
        );
        assert_eq!(parts(&[]), []);
    }

    #[test]
    fn rows_are_equally_long_apart_and_in_order() {
        let is_rectangle =
            |make: &dyn Fn(usize) -> Transfer| parts(&(0..FEWEST_ROWS).map(make).collect::<Vec<_>>())[0].1;
        assert!(is_rectangle(&|i| up(i * 64, i as u64 * 64, 64)));
        assert!(!is_rectangle(&|i| up(i * 63, i as u64 * 64, 64)), "rows overlap");
        assert!(!is_rectangle(&|i| up(10_000 - i * 64, i as u64 * 64, 64)), "downwards");
        assert!(!is_rectangle(&|i| up(i * i * 64, i as u64 * 64, 64)), "uneven");
        assert!(!is_rectangle(&|i| up(i * 64, i as u64 * 64, 64 - i / 20)), "the last are shorter");
        let on_device =
            |i: usize| Transfer::OnDevice { src: DevicePtr(i as u64), dst: DevicePtr(9999), len: 1 };
        assert!(!is_rectangle(&on_device));
    }
}
