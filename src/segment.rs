//! The segment rule and the size classes: how much memory a request takes. Integer arithmetic only.
//!
//! Every pool rounds requests up to a *size class*, and cuts its memory into *runs* of one class.
//!
//! # The rule
//!
//! A segment for `len` bytes spans at least `align_up(len, 32) + 32` bytes and starts on a multiple
//! of 64. CANN demands this of programs that divide memory of `aclrtMallocHost` (CANN application
//! development guide, API reference, 7.0 and later). The rule holds on every device alike.
//!
//! # The classes
//!
//! A class is a *stride*: the distance between two segments of a run. Strides are multiples of 64.
//! So every segment of a run starts on a multiple of 64 if the run does.
//!
//! ```text
//! class      0    1    2  ..   16 |   17    18  ..    24 |   25    26  ..     32 | ...          112
//! stride    64  128  192  .. 1088 | 1216  1344  ..  2112 | 2368  2624  ..   4160 | ...  4 MiB + 64
//!           multiples of 64       | 1024*(9..=16)/8 + 64 | 2048*(9..=16)/8 + 64  | ...
//! ```
//!
//! Up to 1088 the strides are all multiples of 64; above, each doubling has eight steps. Both parts
//! are shifted by 64. So a power-of-two length, the most common request by far, has a stride of its
//! length + 64: the rule itself takes 32 of these, the alignment to 64 the rest. Eight steps bound
//! the loss ((stride - length) / stride) by 12.5% for any length from 4 KiB. Four steps would lose
//! up to 20%; sixteen would halve the loss and double the number of half-used runs.
//!
//! Lengths beyond the largest class, and alignments beyond 64, get a run of pages of their own.
//!
//! # Runs
//!
//! A run of a class has as many pages of [`PAGE`] bytes as make two things small: the tail that no
//! segment fits into (at most 1/64 of the run), and the share of the run's table entry. Where no
//! run of that length is free, a pool cuts a shorter one.
//!
//! # What follows from a change of the classes
//!
//! The constants below and `stride_at` define the classes, tables and arrays, but not this:
//!
//! - `Class::of` has a formula for a length's class, which this file's tests compare.
//! - A state word and a [`Class`] have 8 bits for the class; 255 stands for a run of its own.
//! - Loom's models use classes 18 and 19, with six and four segments in two pages.
//! - The number of classes and the loss by rounding are written out in `docs/architecture.md`,
//!   `docs/operations.md` and `README.md`. Strides, most often 4160, are written out in tests.

use crate::error::{Error, Result};

/// Every segment starts on a multiple of this, in bytes.
pub const SEGMENT_ALIGN: usize = 64;

/// A region's number in its pool, never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct RegionId(pub(crate) u64);

/// The unit of runs, in bytes: a constant that may differ from the system's page size.
pub const PAGE: usize = 4096;

/// The largest alignment that a checkout can ask for, in bytes: a huge page of most systems.
pub const MAX_ALIGN: usize = 2 << 20;

/// Up to this stride, all multiples of 64 are strides.
const LINEAR_MAX: usize = 1024 + SEGMENT_ALIGN;
const LINEAR_CLASSES: usize = LINEAR_MAX / SEGMENT_ALIGN;
/// log2 of the first length of the geometric part, and of the last.
const FIRST_DOUBLING: u32 = 10;
const LAST_DOUBLING: u32 = 22;
/// The doubling before the first, whose steps are as wide as the linear part's.
const LAST_LINEAR: usize = 1 << (FIRST_DOUBLING - 1);

/// Number of size classes.
pub const CLASSES: usize = LINEAR_CLASSES + (LAST_DOUBLING - FIRST_DOUBLING) as usize * 8;

/// The largest length that has a size class, in bytes. Longer requests get their own pages.
pub const LARGEST_CLASS_LEN: usize = stride_at(CLASSES - 1) - 32;

/// A size class: its segments have one length. There are [`CLASSES`], ordered by size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Class(u8);

/// The shape of one run of a class: how long it is, and how many segments it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Pages of [`PAGE`] bytes in a run.
    pub pages: u32,
    /// Segments in a run.
    pub segments: u32,
}

const fn stride_at(index: usize) -> usize {
    if index < LINEAR_CLASSES {
        (index + 1) * SEGMENT_ALIGN
    } else {
        let step = index - LINEAR_CLASSES;
        let doubling = FIRST_DOUBLING + (step / 8) as u32;
        ((9 + step % 8) << (doubling - 3)) + SEGMENT_ALIGN
    }
}

/// The stride and the run of each class.
const TABLE: [(u32, Shape); CLASSES] = {
    let mut table = [(0, Shape { pages: 0, segments: 0 }); CLASSES];
    let mut i = 0;
    while i < CLASSES {
        table[i] = (stride_at(i) as u32, shape_at(stride_at(i)));
        i += 1;
    }
    table
};

/// The smallest run that amortises its table entry and loses at most 1/64 at its end. One segment
/// of 256 KiB or more always does, since less than a page is lost behind it.
const fn shape_at(stride: usize) -> Shape {
    let least = if stride < 4096 {
        64 << 10
    } else if stride <= 64 << 10 {
        256 << 10
    } else {
        0
    };
    let mut segments = if least > stride { least / stride } else { 1 };
    loop {
        let pages = (segments * stride).div_ceil(PAGE);
        let lost = pages * PAGE - segments * stride;
        if lost * 64 <= pages * PAGE {
            return Shape { pages: pages as u32, segments: segments as u32 };
        }
        segments += 1;
    }
}

impl Class {
    /// The class at `index`, smallest first. `None` from [`CLASSES`] on.
    pub fn new(index: usize) -> Option<Self> {
        (index < CLASSES).then_some(Self(index as u8))
    }

    /// All classes, smallest first.
    pub fn all() -> impl DoubleEndedIterator<Item = Self> + ExactSizeIterator {
        (0..CLASSES).map(|i| Self(i as u8))
    }

    /// The smallest class whose segments hold `len` bytes. `None`: 0, or no class holds them.
    #[inline]
    pub fn of(len: usize) -> Option<Self> {
        // Wrapping, so that 0 is beyond the limit.
        if len.wrapping_sub(1) >= LARGEST_CLASS_LEN {
            return None;
        }
        // One formula serves both parts: no processor could predict a branch between them. `below`
        // is what the class's number counts, span - 65, but for bits that are shifted out. It is
        // negative for the first class only, and there the shift, which rounds down, is right.
        let below = len as isize - 33;
        // The leading bit names the doubling, the three bits after it the step. The linear part
        // counts as the doubling below the first, whose steps are 64 wide. (Lengths that the 31
        // lifts into the next doubling have quotient 7 there and 15 here: one class.)
        let shift = ((len + 31) | LAST_LINEAR).ilog2() - 3;
        // The first doubling has shift 7 and quotients 8 to 15.
        const OFFSET: isize = (FIRST_DOUBLING as isize - 2) * 8 - LINEAR_CLASSES as isize;
        Some(Self(((below >> shift) + shift as isize * 8 - OFFSET) as u8))
    }

    /// Position among the classes, smallest first: below [`CLASSES`].
    #[inline]
    pub fn index(self) -> usize {
        self.0 as usize
    }

    /// Bytes from one segment of this class to the next: what a request takes of the pool.
    #[inline]
    pub fn stride(self) -> usize {
        TABLE[self.0 as usize].0 as usize
    }

    /// The pages that runs for `count` segments of this class take. Whole runs have the class's
    /// shape, and the last one has the pages that its segments need.
    pub(crate) fn pages_of(self, count: usize) -> usize {
        let Shape { pages, segments } = self.shape();
        let (runs, rest) = (count / segments as usize, count % segments as usize);
        runs.saturating_mul(pages as usize).saturating_add((rest * self.stride()).div_ceil(PAGE))
    }

    /// The shape of one run of this class.
    pub fn shape(self) -> Shape {
        TABLE[self.0 as usize].1
    }
}

/// The smallest span of a segment for `len` bytes, in bytes: `align_up(len, 32) + 32`.
///
/// # Errors
/// [`Error::ZeroLength`] for 0, and [`Error::TooLong`] where the arithmetic would overflow.
pub fn span(len: usize) -> Result<usize> {
    if len == 0 {
        return Err(Error::ZeroLength);
    }
    // This leaves room for every rounding that follows.
    let largest = isize::MAX as usize - 2 * MAX_ALIGN;
    if len > largest {
        return Err(Error::TooLong { len, largest });
    }
    Ok(((len + 31) & !31) + 32)
}

/// Where a pool serves a request from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// A segment of this class, in a run that other segments of the class share.
    Class(Class),
    /// A run of its own: the pages of `span` bytes, the first on a multiple of `align` pages.
    Pages {
        /// Bytes that the segment spans by the rule.
        span: usize,
        /// Alignment of the first page, in pages of [`PAGE`] bytes.
        align: usize,
    },
}

impl Placement {
    /// Where a pool serves `len` bytes from that start on a multiple of `align` bytes.
    ///
    /// # Errors
    /// [`Error::ZeroLength`] for 0 bytes, [`Error::TooLong`] on overflow, [`Error::Argument`] for
    /// an alignment that is no power of two or that is above [`MAX_ALIGN`].
    pub fn of(len: usize, align: usize) -> Result<Self> {
        if !align.is_power_of_two() || align > MAX_ALIGN {
            let text = format!("{align} is no alignment: it must be a power of two of at most {MAX_ALIGN}");
            return Err(Error::Argument(text));
        }
        let span = span(len)?;
        if align <= SEGMENT_ALIGN {
            if let Some(class) = Class::of(len) {
                return Ok(Self::Class(class));
            }
        }
        Ok(Self::Pages { span, align: align.div_ceil(PAGE) })
    }

    /// The least number of bytes that the placement takes of a pool.
    pub fn bytes(self) -> usize {
        match self {
            Self::Class(class) => class.stride(),
            Self::Pages { span, .. } => span.next_multiple_of(PAGE),
        }
    }

    /// The least number of adjacent free pages that the placement needs where no run has a free
    /// segment for it, and their alignment. Both in pages of [`PAGE`] bytes.
    pub fn fresh_pages(self) -> (usize, usize) {
        match self {
            Self::Class(class) => (class.stride().div_ceil(PAGE), 1),
            Self::Pages { span, align } => (span.div_ceil(PAGE), align),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_table_in_the_essay_is_the_table() {
        let stride = |i| Class::new(i).unwrap().stride();
        assert_eq!(
            [stride(0), stride(1), stride(16), stride(17), stride(24), stride(25), stride(32)],
            [64, 128, 1088, 1216, 2112, 2368, 4160]
        );
        assert_eq!(CLASSES, 113);
        assert_eq!(stride(CLASSES - 1), (4 << 20) + 64);
        assert_eq!(Class::new(CLASSES), None);
    }

    #[test]
    fn every_length_gets_the_smallest_class_that_fits() {
        let mut class = 0;
        for len in 1..=300_000 {
            while stride_at(class) - 32 < (len + 31) & !31 {
                class += 1;
            }
            assert_eq!(Class::of(len).map(Class::index), Some(class), "length {len}");
        }
        for class in Class::all() {
            assert_eq!(Class::of(class.stride() - 32), Some(class));
            assert_eq!(Class::of(class.stride() - 31), Class::new(class.index() + 1));
        }
        for len in (0..=22).map(|shift| 1 << shift) {
            assert!(Class::of(len).unwrap().stride() <= len + 64, "length {len}");
        }
    }

    #[test]
    fn rounding_loses_little() {
        // (stride - length) / stride of what a request is given.
        let loss = |len: usize| {
            let given = Placement::of(len, 64).unwrap().bytes();
            (given - len) as f64 / given as f64
        };
        let worst = (4096..=8 << 20).map(loss).fold(0.0, f64::max);
        assert!(worst <= 0.125, "worst loss from 4 KiB: {worst:.4}");
        // Log-uniform from 1 KiB to 64 MiB.
        let n = 1_000_000;
        let len = |i: u32| (1024.0 * 2f64.powf(16.0 * f64::from(i) / f64::from(n))) as usize;
        let mean = (0..n).map(|i| loss(len(i))).sum::<f64>() / f64::from(n);
        assert!(mean <= 0.06, "mean loss: {mean:.4}");
    }

    #[test]
    fn runs_lose_little_at_their_end() {
        for class in Class::all() {
            let Shape { pages, segments } = class.shape();
            let (run, used) = (pages as usize * PAGE, segments as usize * class.stride());
            assert!(segments > 0 && used <= run && (run - used) * 64 <= run, "{class:?}: {used} of {run}");
            assert!(run <= 6 << 20);
        }
    }

    #[test]
    fn nonsense_is_refused() {
        assert_eq!(Placement::of(0, 64), Err(Error::ZeroLength));
        let largest = isize::MAX as usize - 2 * MAX_ALIGN;
        assert_eq!(span(largest), Ok(largest.div_ceil(32) * 32 + 32));
        for len in [largest + 1, usize::MAX] {
            assert_eq!(Placement::of(len, 64), Err(Error::TooLong { len, largest }));
        }
        for align in [0, 3, 96, MAX_ALIGN * 2, usize::MAX] {
            let refused = Placement::of(1, align).unwrap_err();
            assert!(refused.to_string().contains("no alignment"), "{refused}");
        }
        assert_eq!([0, LARGEST_CLASS_LEN + 1, usize::MAX].map(Class::of), [None; 3]);
    }

    proptest! {
        #[test]
        fn the_rule_holds_for_any_request(len in 1usize..(1 << 36), shift in 0u32..22) {
            let align = 1usize << shift;
            let need = len.next_multiple_of(32) + 32;
            match Placement::of(len, align).unwrap() {
                Placement::Class(class) => {
                    prop_assert!(align <= SEGMENT_ALIGN);
                    prop_assert!(class.stride() >= need && class.stride() % SEGMENT_ALIGN == 0);
                }
                Placement::Pages { span, align: a } => {
                    prop_assert_eq!(span, need);
                    prop_assert!(a * PAGE >= align && a.is_power_of_two());
                }
            }
        }
    }
}
